//! The sliding windows of decoders' layers, as `config.json` has them.

use numcore::Result;
use serde_json::{Map, Value, json};

use super::{ConfigFields, Family};

/// Tells whether layers of a family may have different windows, which `layer_types` lists.
fn alternates(family: Family) -> bool {
    matches!(family, Family::Qwen2 | Family::Qwen3 | Family::Qwen2Moe | Family::SmolLm3 | Family::GptOss)
        || family.is_gemma()
}

/// Tells whether the field `sliding_window` may give a window.
fn has_window(family: Family) -> bool {
    !matches!(family, Family::Llama | Family::Olmo2 | Family::DeepseekV3)
}

/// Tells whether the field `use_sliding_window` turns windows on and off.
fn has_switch(family: Family) -> bool {
    matches!(family, Family::Qwen2 | Family::Qwen3 | Family::Qwen2Moe | Family::Qwen3Moe | Family::SmolLm3)
}

/// Writes the fields from which these windows can be read again.
pub(super) fn insert_windows(fields: &mut Map<String, Value>, family: Family, windows: &[Option<usize>]) {
    let window = windows.iter().flatten().next();
    fields.remove("layer_types");
    if has_window(family) {
        fields.insert("sliding_window".into(), json!(window));
    }
    if has_switch(family) {
        fields.insert("use_sliding_window".into(), window.is_some().into());
    }
    if alternates(family) {
        let kind = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
        fields.insert("layer_types".into(), windows.iter().map(kind).collect());
    }
}

/// The window of each layer. Qwen has one only where a flag is set, from some layer on; SmolLM 3 in its `unrotated`
/// layers, if `layer_types` does not list others.
pub(super) fn windows(
    fields: &ConfigFields,
    family: Family,
    layers: usize,
    unrotated: &[usize],
) -> Result<Vec<Option<usize>>> {
    // The default applies to an absent field; null means no window.
    let default = family.defaults().window.filter(|_| !fields.has("sliding_window"));
    let given = if has_window(family) { fields.maybe_size("sliding_window")? } else { None };
    let window = given.or(default);
    let is_qwen = matches!(family, Family::Qwen2 | Family::Qwen3 | Family::Qwen2Moe);
    let border = if is_qwen { fields.size_or("max_window_layers", 28)? } else { 0 };
    // Fields of published files that transformers does not read.
    match family {
        Family::Qwen3Moe | Family::SmolLm3 => fields.maybe_size("max_window_layers")?,
        Family::Gemma2 => fields.maybe_size("sliding_window_size")?,
        _ => None,
    };
    let used = !has_switch(family) || fields.flag_or("use_sliding_window", false)?;
    let pattern = if family == Family::Gemma3 { pattern(fields)? } else { 2 };
    let window = window.filter(|_| used);
    if window == Some(0) {
        return Err(fields.wrong("sliding_window", "is 0: no query would see a key; null means no window"));
    }
    let Some(types) = fields.list("layer_types")? else {
        // Qwen 2 with experts has windows in every other layer before the border, and none after it. Every sixth layer
        // of Gemma 3, and every other of Gemma 2 and GPT-OSS, has none.
        let has = |layer: usize| match family {
            Family::Qwen2Moe => layer < border && layer.is_multiple_of(2),
            Family::SmolLm3 => unrotated.contains(&layer),
            Family::Gemma2 | Family::Gemma3 | Family::GptOss => !(layer + 1).is_multiple_of(pattern),
            _ => layer >= border,
        };
        return Ok((0..layers).map(|layer| window.filter(|_| has(layer))).collect());
    };
    if types.len() != layers {
        return Err(fields.wrong("layer_types", format_args!("lists {} layers of {layers}", types.len())));
    }
    let of_type = |kind: &str| match kind {
        "full_attention" => Ok(None),
        "sliding_attention" if window.is_some() => Ok(window),
        other => Err(fields.wrong("layer_types", format_args!("has `{other}`, which goes with no `sliding_window`"))),
    };
    let windows = types.into_iter().map(of_type).collect::<Result<Vec<_>>>()?;
    if !alternates(family) && windows.iter().any(|of_layer| *of_layer != window) {
        let why = format_args!("differ, and a `{}` has all layers alike: `sliding_window` says how", family.name());
        return Err(fields.wrong("layer_types", why));
    }
    Ok(windows)
}

/// The number of layers from one without a window to the next, by either of its names.
fn pattern(fields: &ConfigFields) -> Result<usize> {
    let read = fields.maybe_size("sliding_window_pattern")?;
    // Transformers writes this one, and does not read it.
    fields.maybe_size("_sliding_window_pattern")?;
    match read.unwrap_or(6) {
        0 => Err(fields.wrong("sliding_window_pattern", "is 0")),
        pattern => Ok(pattern),
    }
}
