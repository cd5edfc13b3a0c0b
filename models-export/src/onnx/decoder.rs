//! The graph of a decoder.

use std::collections::{BTreeMap, BTreeSet};

use models::{Decoder, DecoderConfig, Family, RopeConfig, RopeScaling};
use numcore::{Error, Result, Runtime};

use super::{
    graph::OnnxGraph,
    layers::ModelGraph,
    parts::{Attribute, OnnxType, Size},
};

/// Builds the graph of a model, from tokens to logits.
///
/// # Errors
/// Fails if the model lacks a parameter of its family, has mixtures of experts, or is of a family that is not written.
pub(super) fn graph<'a, R: Runtime>(model: &Decoder<R>) -> Result<OnnxGraph<'a>> {
    let (config, mut m) = (model.config(), ModelGraph::new("decoder", model));
    if config.mixtures.is_some() {
        let why = format!(
            "experts of `{}` have no graph of a fixed size: save it by `save_pretrained`",
            config.family.name()
        );
        return Err(Error::config("onnx", "mixtures", why));
    }
    crate::check_family("onnx", config.family)?;
    if let Some(RopeConfig { scaling: RopeScaling::LongRope { .. }, .. }) = config.rope {
        let why = "is `longrope`, which has no graph: save the model by `save_pretrained`";
        return Err(Error::config("onnx", "rope", why));
    }
    let (any, vocab) = ([Size::Any("batch"), Size::Any("sequence")], Size::Is(config.vocab));
    let tokens = m.graph.input("input_ids", OnnxType::I64, &any);
    let positions = positions(&mut m.graph, &tokens);
    let embedding = m.parameter("embed_tokens.weight")?;
    let mut x = m.graph.op("Gather", &[&embedding, &tokens]);
    if config.rope.is_none() {
        let learned = m.parameter("embed_positions.weight")?;
        let places = m.graph.op("Gather", &[&learned, &positions]);
        x = m.graph.op("Add", &[&x, &places]);
    }
    let windows: BTreeSet<Option<usize>> = config.windows.iter().copied().collect();
    let masks = windows.into_iter().map(|window| (window, mask(&mut m.graph, &positions, window))).collect();
    let layers = Layers { config, tables: tables(&mut m.graph, config, &positions), masks };
    for i in 0..config.layers {
        x = layers.layer(&mut m, &x, i)?;
    }
    let states = layers.norm(&mut m, &x, "norm")?;
    let logits = match config.tied {
        false => m.linear(&states, "lm_head")?,
        true => {
            let head = m.graph.op_with("Transpose", &[&embedding], &[("perm", Attribute::Ints(&[1, 0]))]);
            m.graph.op("MatMul", &[&states, &head])
        }
    };
    m.graph.output(&logits, "logits", OnnxType::F32, &[any[0], any[1], vocab]);
    Ok(m.graph)
}

/// The positions 0, 1, … of the tokens, `[T]`.
fn positions(g: &mut OnnxGraph<'_>, tokens: &str) -> String {
    let (shape, axis) = (g.op("Shape", &[tokens]), g.int(1));
    let count = g.op("Gather", &[&shape, &axis]);
    let (zero, one) = (g.int(0), g.int(1));
    g.op("Range", &[&zero, &count, &one])
}

/// The cosines and sines of each position's rotations, `[T, D / 2]`.
fn tables(g: &mut OnnxGraph<'_>, config: &DecoderConfig, positions: &str) -> Option<[String; 2]> {
    let rotary = config.rope.as_ref()?.rotary(config.head_dim);
    let frequencies: Vec<f32> = rotary.frequencies.iter().map(|&f| f as f32).collect();
    let frequencies = g.row("rotary_frequencies", &frequencies);
    let axis = g.ints(&[1]);
    let column = g.op_with("Cast", &[positions], &[("to", Attribute::Int(OnnxType::F32 as i64))]);
    let column = g.op("Unsqueeze", &[&column, &axis]);
    let angles = g.op("Mul", &[&column, &frequencies]);
    let mut table = |kind| {
        let table = g.op(kind, &[&angles]);
        if rotary.scale == 1.0 {
            return table;
        }
        let scale = g.float(rotary.scale as f32);
        g.op("Mul", &[&table, &scale])
    };
    Some([table("Cos"), table("Sin")])
}

/// The values that all layers share.
struct Layers<'c> {
    config: &'c DecoderConfig,
    /// The cosines and sines, if positions are rotary.
    tables: Option<[String; 2]>,
    /// The mask of the keys that a query sees, by window.
    masks: BTreeMap<Option<usize>, String>,
}

impl Layers<'_> {
    fn layer<R: Runtime>(&self, m: &mut ModelGraph<'_, R>, x: &str, i: usize) -> Result<String> {
        let normal = self.norm(m, x, &format!("layers.{i}.input_norm"))?;
        let found = self.attention(m, &normal, i)?;
        let found = m.linear(&found, &format!("layers.{i}.self_attn.o_proj"))?;
        let x = m.graph.op("Add", &[x, &found]);
        let normal = self.norm(m, &x, &format!("layers.{i}.mlp_norm"))?;
        let wide = self.mlp(m, &normal, &format!("layers.{i}.mlp"))?;
        Ok(m.graph.op("Add", &[&x, &wide]))
    }

    fn norm<R: Runtime>(&self, m: &mut ModelGraph<'_, R>, x: &str, module: &str) -> Result<String> {
        match self.config.family {
            Family::Gpt2 => m.layer_norm(x, module, self.config.norm_eps),
            _ => m.rms_norm(x, module, self.config.norm_eps),
        }
    }

    fn mlp<R: Runtime>(&self, m: &mut ModelGraph<'_, R>, x: &str, module: &str) -> Result<String> {
        let (activation, down) = (self.config.activation, format!("{module}.down_proj"));
        let up = m.linear(x, &format!("{module}.up_proj"))?;
        if self.config.family == Family::Gpt2 {
            let active = m.activation(&up, activation);
            return m.linear(&active, &down);
        }
        let gate = m.linear(x, &format!("{module}.gate_proj"))?;
        let active = m.activation(&gate, activation);
        let product = m.graph.op("Mul", &[&active, &up]);
        m.linear(&product, &down)
    }

    fn attention<R: Runtime>(&self, m: &mut ModelGraph<'_, R>, x: &str, i: usize) -> Result<String> {
        let (config, module) = (self.config, format!("layers.{i}.self_attn"));
        let [q, k, v] = self.project(m, x, &module)?;
        let depth = config.head_dim;
        let q = self.placed(m, &q, config.heads, &format!("{module}.q_norm"))?;
        let k = self.placed(m, &k, config.kv_heads, &format!("{module}.k_norm"))?;
        let v = m.heads(&v, [config.kv_heads, depth]);
        let v = m.heads_first(&v);
        let [k, v] = [k, v].map(|x| self.repeated(&mut m.graph, &x));
        let mask = self.masks.get(&config.windows[i]).map(String::as_str);
        Ok(m.attention([&q, &k, &v], [config.heads, depth], mask))
    }

    /// The projections to queries, keys and values, each `[B, T, H · D]`.
    fn project<R: Runtime>(&self, m: &mut ModelGraph<'_, R>, x: &str, module: &str) -> Result<[String; 3]> {
        if self.config.family != Family::Gpt2 {
            let mut one = |name| m.linear(x, &format!("{module}.{name}"));
            return Ok([one("q_proj")?, one("k_proj")?, one("v_proj")?]);
        }
        let all = m.linear(x, &format!("{module}.qkv_proj"))?;
        let mut parts = m.graph.split(&all, -1, &[self.config.width as i64; 3]).into_iter();
        Ok(std::array::from_fn(|_| parts.next().unwrap_or_default()))
    }

    /// The heads of queries or keys, `[B, H, T, D]`, normalized and rotated.
    fn placed<R: Runtime>(&self, m: &mut ModelGraph<'_, R>, x: &str, heads: usize, norm: &str) -> Result<String> {
        let mut x = m.heads(x, [heads, self.config.head_dim]);
        if self.config.family == Family::Qwen3 {
            x = m.rms_norm(&x, norm, self.config.norm_eps)?;
        }
        let x = m.heads_first(&x);
        Ok(self.rotated(&mut m.graph, x))
    }

    /// Rotates the two halves of each head into each other.
    fn rotated(&self, g: &mut OnnxGraph<'_>, x: String) -> String {
        let Some([cos, sin]) = &self.tables else { return x };
        let half = (self.config.head_dim / 2) as i64;
        let parts = g.split(&x, -1, &[half, half]);
        let mut product = |part: usize, table: &str| g.op("Mul", &[&parts[part], table]);
        let (a, b, c, d) = (product(0, cos), product(1, sin), product(1, cos), product(0, sin));
        let (first, second) = (g.op("Sub", &[&a, &b]), g.op("Add", &[&c, &d]));
        g.op_with("Concat", &[&first, &second], &[("axis", Attribute::Int(-1))])
    }

    /// Repeats keys or values `[B, G, T, D]` for each head of queries, `[B, H, T, D]`.
    fn repeated(&self, g: &mut OnnxGraph<'_>, x: &str) -> String {
        let (heads, groups) = (self.config.heads, self.config.kv_heads);
        if heads == groups {
            return x.to_owned();
        }
        let (axis, copies) = (g.ints(&[2]), g.ints(&[1, 1, (heads / groups) as i64, 1, 1]));
        let shape = g.ints(&[0, heads as i64, -1, self.config.head_dim as i64]);
        let x = g.op("Unsqueeze", &[x, &axis]);
        let x = g.op("Expand", &[&x, &copies]);
        g.op("Reshape", &[&x, &shape])
    }
}

/// The mask of the keys that a query sees, `[T, T]`: those up to its own, within the window.
fn mask(g: &mut OnnxGraph<'_>, positions: &str, window: Option<usize>) -> String {
    let (first, second) = (g.ints(&[0]), g.ints(&[1]));
    let columns = g.op("Unsqueeze", &[positions, &first]);
    let rows = g.op("Unsqueeze", &[positions, &second]);
    let seen = g.op("GreaterOrEqual", &[&rows, &columns]);
    let Some(window) = window else { return seen };
    let (distance, window) = (g.op("Sub", &[&rows, &columns]), g.int(window as i64));
    let near = g.op("Less", &[&distance, &window]);
    g.op("And", &[&seen, &near])
}
