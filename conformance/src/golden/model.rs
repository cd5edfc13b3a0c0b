//! The models of training runs, built from the descriptions in their cases.

use nn::{AdaptiveAvgPool2d, AvgPool2d, Conv2d, Flatten, Forward, Gpt, GptConfig, Init, Linear, MaxPool2d, Sequential};
use numcore::{Error, Result, Runtime, fused::ConvOptions};
use serde_json::Value;

use super::Case;

type Layer<R> = Box<dyn Forward<R>>;

/// Builds the model that a case names; its values are loaded afterwards.
pub(super) fn model<R: Runtime>(rt: &R, case: &Case) -> Result<Layer<R>> {
    let init = Init::new(rt, 0);
    match case.op.as_str() {
        "gpt" => gpt(&init, case),
        _ => {
            let texts = descriptions(case)?;
            let layers = texts.iter().enumerate().map(|(i, text)| layer(&init, case, i, text));
            Ok(Box::new(layers.collect::<Result<Sequential<R>>>()?))
        }
    }
}

fn gpt<R: Runtime>(init: &Init<R>, case: &Case) -> Result<Layer<R>> {
    let a = &case.attrs;
    for (what, is) in [("gelu", "erf"), ("linear_weight", "[out, in]")] {
        if a.str(what, is)? != is {
            return Err(bad(&format!("{what} is not `{is}`")));
        }
    }
    Ok(Box::new(Gpt::new(
        init,
        GptConfig {
            vocab: a.need(&["vocab"])?,
            context: a.need(&["ctx"])?,
            layers: a.need(&["layers"])?,
            heads: a.need(&["heads"])?,
            width: a.need(&["d"])?,
            bias: case.maybe("init/blocks.0.qkv.bias").is_some(),
            dropout: 0.0,
            tied_head: case.maybe("init/head.weight").is_none(),
            ..GptConfig::default()
        },
    )?))
}

/// The descriptions of layers, from a list or from a string with spaces between them.
fn descriptions(case: &Case) -> Result<Vec<String>> {
    match case.attrs.raw("layers") {
        Some(Value::String(text)) => Ok(text.split_whitespace().map(str::to_string).collect()),
        Some(Value::Array(list)) => Ok(list.iter().filter_map(|v| v.as_str().map(str::to_string)).collect()),
        _ => Err(bad("`layers` says nothing")),
    }
}

fn bad(why: &str) -> Error {
    Error::format("golden", format!("the model is not clear: {why}"))
}

/// Builds a layer from its description: `linear`, `linear(32,5)`, `conv(1,4,3,pad1)`, `maxpool2`, `relu` …. Sizes that
/// are not given are taken from the first weights.
fn layer<R: Runtime>(init: &Init<R>, case: &Case, i: usize, text: &str) -> Result<Layer<R>> {
    let (name, arguments) = text.strip_suffix(')').and_then(|t| t.split_once('(')).unwrap_or((text, ""));
    let (word, number) = name.split_at(name.find(|c: char| c.is_ascii_digit()).unwrap_or(name.len()));
    let size = number.parse().unwrap_or(2);
    Ok(match word {
        "linear" => linear(init, case, i)?,
        "conv" => conv(init, case, i, arguments)?,
        "maxpool" => Box::new(MaxPool2d::new(size)),
        "avgpool" => Box::new(AvgPool2d::new(size)),
        "gap" => Box::new(AdaptiveAvgPool2d { size: [1, 1] }),
        "flatten" => Box::new(Flatten::default()),
        "relu" => Box::new(nn::Relu),
        "tanh" => Box::new(nn::Tanh),
        "gelu" => Box::new(nn::Gelu),
        "silu" => Box::new(nn::Silu),
        "sigmoid" => Box::new(nn::Sigmoid),
        _ => return Err(bad(&format!("`{text}` is not a layer this runner knows"))),
    })
}

fn weight<'a>(case: &'a Case, i: usize, what: &str) -> Option<&'a [usize]> {
    case.maybe(&format!("init/{i}.{what}")).map(|w| w.shape.dims())
}

fn linear<R: Runtime>(init: &Init<R>, case: &Case, i: usize) -> Result<Layer<R>> {
    let Some(&[outputs, inputs]) = weight(case, i, "weight") else { return Err(bad("a linear layer has no weight")) };
    let layer = Linear::new(init, inputs, outputs)?;
    Ok(Box::new(if weight(case, i, "bias").is_some() { layer } else { layer.without_bias() }))
}

/// Builds a convolution. Its arguments are `inputs, outputs, kernel` and, in any order, `padN`, `strideN`, `dilN`,
/// `groupsN`.
fn conv<R: Runtime>(init: &Init<R>, case: &Case, i: usize, arguments: &str) -> Result<Layer<R>> {
    let Some(&[outputs, inputs, r, s]) = weight(case, i, "weight") else {
        return Err(bad("a convolution has no weight"));
    };
    let option = |name: &str, default: usize| {
        let found = arguments.split(',').find_map(|a| a.trim().strip_prefix(name));
        found.and_then(|n| n.trim_start_matches('=').parse().ok()).unwrap_or(default)
    };
    let groups = option("groups", 1);
    let options = ConvOptions {
        stride: [option("stride", 1); 2],
        padding: [option("pad", 0); 2],
        dilation: [option("dil", 1); 2],
        groups,
    };
    let layer = Conv2d::new(init, inputs * groups, outputs, [r, s], options)?;
    Ok(Box::new(if weight(case, i, "bias").is_some() { layer } else { layer.without_bias() }))
}
