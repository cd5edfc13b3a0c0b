//! The models of training runs, built from the descriptions in their cases.

use autograd::Var;
use nn::{
    AdaptiveAvgPool2d, AvgPool2d, Conv2d, ConvTranspose2d, Embedding, Flatten, Forward, Gpt, GptConfig, GroupNorm,
    Init, LayerNorm, Linear, Lstm, MaxPool2d, Module, RecurrentConfig, RmsNorm, Sequential, Visitor,
};
use numcore::{
    Error, Result, Runtime,
    fused::ConvOptions,
    ops::{ReduceOps, ViewOps},
};
use serde_json::Value;

use super::Case;

type Layer<R> = Box<dyn Forward<R>>;

/// Builds the model that a case names; its values are loaded afterwards.
pub(super) fn model<R: Runtime>(rt: &R, case: &Case) -> Result<Layer<R>> {
    let init = Init::new(rt, 0);
    let init = case.under("init/").next().map_or(init.clone(), |(_, value)| init.dtype(value.dtype));
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
        "convt" => transposed(init, case, i, arguments)?,
        "embedding" => match weight(case, i, "weight") {
            Some(&[rows, width]) => Box::new(Embedding::new(init, rows, width)?),
            _ => return Err(bad("a table has no weight")),
        },
        "layernorm" => Box::new(LayerNorm::new(init, width(case, i)?)?),
        "rmsnorm" => Box::new(RmsNorm { eps: Some(1e-6), ..RmsNorm::new(init, width(case, i)?)? }),
        "groupnorm" => Box::new(GroupNorm::new(init, size, width(case, i)?)?),
        "lstm" => match weight(case, i, "weight_ih_l0") {
            Some(&[gates, inputs]) => {
                Box::new(Lstm::new(init, RecurrentConfig { layers: size, ..RecurrentConfig::new(inputs, gates / 4) })?)
            }
            _ => return Err(bad("a recurrent layer has no weight")),
        },
        "mean" => Box::new(Pooled { last: false }),
        "last" => Box::new(Pooled { last: true }),
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

/// The number of elements of a norm's weight.
fn width(case: &Case, i: usize) -> Result<usize> {
    let width = weight(case, i, "weight").and_then(|dims| dims.first().copied());
    width.ok_or_else(|| bad("a norm has no weight"))
}

/// The mean over the tokens of `[B, T, C]`, or the last of them.
#[derive(Debug)]
struct Pooled {
    last: bool,
}

impl<R: Runtime> Module<R> for Pooled {
    fn visit(&self, _: &str, _: &mut dyn Visitor<R>) {}
}

impl<R: Runtime> Forward<R> for Pooled {
    fn forward(&self, x: &Var<R>) -> Result<Var<R>> {
        if self.last { x.select(1, x.dims()[1] - 1) } else { x.mean(&[1]) }
    }
}

/// Builds a convolution. Its arguments are `inputs, outputs, kernel` and, in any order, `padN`, `strideN`, `dilN`,
/// `groupsN`.
fn conv<R: Runtime>(init: &Init<R>, case: &Case, i: usize, arguments: &str) -> Result<Layer<R>> {
    let Some(&[outputs, inputs, r, s]) = weight(case, i, "weight") else {
        return Err(bad("a convolution has no weight"));
    };
    let options = conv_options(arguments);
    let layer = Conv2d::new(init, inputs * options.groups, outputs, [r, s], options)?;
    Ok(Box::new(if weight(case, i, "bias").is_some() { layer } else { layer.without_bias() }))
}

/// Builds a transposed convolution with a bias, with the arguments of a convolution.
fn transposed<R: Runtime>(init: &Init<R>, case: &Case, i: usize, arguments: &str) -> Result<Layer<R>> {
    let Some(&[inputs, outputs, r, s]) = weight(case, i, "weight") else {
        return Err(bad("a transposed convolution has no weight"));
    };
    let options = conv_options(arguments);
    Ok(Box::new(ConvTranspose2d::new(init, inputs, outputs * options.groups, [r, s], options)?))
}

fn conv_options(arguments: &str) -> ConvOptions {
    let option = |name: &str, default: usize| {
        let found = arguments.split(',').find_map(|a| a.trim().strip_prefix(name));
        found.and_then(|n| n.trim_start_matches('=').parse().ok()).unwrap_or(default)
    };
    ConvOptions {
        stride: [option("stride", 1); 2],
        padding: [option("pad", 0); 2],
        dilation: [option("dil", 1); 2],
        groups: option("groups", 1),
    }
}
