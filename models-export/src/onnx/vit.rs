//! The graph of a ViT.

use models::{Vit, VitConfig};
use numcore::{Result, Runtime};

use super::{
    graph::OnnxGraph,
    layers::ModelGraph,
    parts::{Attribute, OnnxType, Size},
};

/// Builds the graph of a model, from images to logits.
///
/// # Errors
/// Fails if the model lacks a parameter.
pub(super) fn graph<'a, R: Runtime>(model: &Vit<R>) -> Result<OnnxGraph<'a>> {
    let (config, mut m) = (model.config(), ModelGraph::new("vit", model));
    let batch = Size::Any("batch");
    let sizes = [batch, Size::Is(config.channels), Size::Is(config.image), Size::Is(config.image)];
    let pixels = m.graph.input("pixel_values", OnnxType::F32, &sizes);
    let mut x = embed(&mut m, config, &pixels)?;
    for i in 0..config.layers {
        x = layer(&mut m, config, &x, &format!("layers.{i}"))?;
    }
    let first = m.graph.int(0);
    let state = m.graph.op_with("Gather", &[&x, &first], &[("axis", Attribute::Int(1))]);
    let state = m.layer_norm(&state, "norm", config.block.eps)?;
    let logits = m.linear(&state, "classifier")?;
    m.graph.output(&logits, "logits", OnnxType::F32, &[batch, Size::Is(config.labels)]);
    Ok(m.graph)
}

/// The class token, and the patches of images after it, `[B, 1 + patches, C]`, with positions added.
fn embed<R: Runtime>(m: &mut ModelGraph<'_, R>, config: &VitConfig, pixels: &str) -> Result<String> {
    let (weight, bias) = (m.parameter("patches.weight")?, m.parameter("patches.bias")?);
    let (token, positions) = (m.parameter("cls_token")?, m.parameter("positions")?);
    let (g, width, patch) = (&mut m.graph, config.block.width as i64, [config.patch as i64; 2]);
    let attributes = [("kernel_shape", Attribute::Ints(&patch)), ("strides", Attribute::Ints(&patch))];
    let patches = g.op_with("Conv", &[pixels, &weight, &bias], &attributes);
    let flat = g.ints(&[0, width, -1]);
    let patches = g.op("Reshape", &[&patches, &flat]);
    let patches = g.op_with("Transpose", &[&patches], &[("perm", Attribute::Ints(&[0, 2, 1]))]);
    let (shape, axis, rest) = (g.op("Shape", &[pixels]), g.ints(&[0]), g.ints(&[1, width]));
    let batch = g.op("Gather", &[&shape, &axis]);
    let shape = g.op_with("Concat", &[&batch, &rest], &[("axis", Attribute::Int(0))]);
    let tokens = g.op("Expand", &[&token, &shape]);
    let all = g.op_with("Concat", &[&tokens, &patches], &[("axis", Attribute::Int(1))]);
    Ok(g.op("Add", &[&all, &positions]))
}

fn layer<R: Runtime>(m: &mut ModelGraph<'_, R>, config: &VitConfig, x: &str, module: &str) -> Result<String> {
    let (block, part) = (&config.block, |name: &str| format!("{module}.{name}"));
    let sizes = [block.heads, block.width / block.heads];
    let normal = m.layer_norm(x, &part("norm1"), block.eps)?;
    let mut heads = |name| {
        let projected = m.linear(&normal, &part(name))?;
        let heads = m.heads(&projected, sizes);
        Ok::<_, numcore::Error>(m.heads_first(&heads))
    };
    let (q, k, v) = (heads("query")?, heads("key")?, heads("value")?);
    let found = m.attention([&q, &k, &v], sizes, None);
    let found = m.linear(&found, &part("output"))?;
    let x = m.graph.op("Add", &[x, &found]);
    let normal = m.layer_norm(&x, &part("norm2"), block.eps)?;
    let wide = m.linear(&normal, &part("fc1"))?;
    let active = m.activation(&wide, block.activation);
    let back = m.linear(&active, &part("fc2"))?;
    Ok(m.graph.op("Add", &[&x, &back]))
}
