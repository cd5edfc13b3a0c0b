//! The changes of families of pretrained models that a test must notice.

use super::Mutant;

#[rustfmt::skip]
const COMPARED: &[&str] = &[
    "test", "-p", "weftgrad-models", "--test", "all", "--", "images::", "seq2seq::", "whisper::", "clip::", "long_context::",
    "decoders::logits",
];

#[rustfmt::skip]
const READ: &[&str] = &["test", "-p", "weftgrad-models", "--test", "all", "--", "gguf::", "mxfp4::", "mtp::"];

const IMPORTED: &[&str] = &["test", "-p", "weftgrad-models-import", "--test", "all"];

#[rustfmt::skip]
const SCORES: &[&str] = &["test", "-p", "weftgrad-models", "--test", "all", "--", "same::", "stages::programs"];

#[rustfmt::skip]
pub(super) const FAMILIES: &[Mutant] = &[
    Mutant { file: "models/src/config/rope_scaling.rs", from: "yarn_scale(factor, all_dim).powi(2)", to: "yarn_scale(factor, all_dim)", test: COMPARED },
    Mutant { file: "models/src/generate/mod.rs", from: "if self.model.outgrows(&cache, 1).is_some() {", to: "if false {", test: COMPARED },
    Mutant { file: "models/src/pretrained.rs", from: "buffer.set(value.to_dtype(buffer.spec().dtype)?).at_caller()?;", to: "let _ = value;", test: COMPARED },
    Mutant { file: "models/src/encoder/resnet.rs", from: "if config.halves_before { (stride, 1) } else { (1, stride) }", to: "(1, stride)", test: COMPARED },
    Mutant { file: "models/src/seq2seq/stack.rs", from: "relative.of(tokens, before + tokens)", to: "relative.of(tokens, tokens.max(before))", test: COMPARED },
    Mutant { file: "models/src/seq2seq/stack.rs", from: "mask: memory.mask.as_ref(), bias: None", to: "mask: None, bias: None", test: COMPARED },
    Mutant { file: "models/src/seq2seq/text_decoder.rs", from: "narrow(0, before, t)", to: "narrow(0, 0, t)", test: COMPARED },
    Mutant { file: "models/src/clip/mod.rs", from: "tokens.eq(end as f64)?.to_dtype(DType::F32)?", to: "tokens.to_dtype(DType::F32)?", test: COMPARED },
    Mutant { file: "models/src/clip/mod.rs", from: "ConversionTable { prefix, ..CLIP }", to: "CLIP", test: COMPARED },
    Mutant { file: "models/src/seq2seq/t5.rs", from: "scaled: !multilingual && ", to: "scaled: ", test: COMPARED },
    Mutant { file: "models/src/seq2seq/speech.rs", from: "if next.1 > best.1 { next } else { best }", to: "best", test: COMPARED },
    Mutant { file: "models/src/generate/time_stamps.rs", from: "usize::from(!is_last)", to: "1", test: COMPARED },
    Mutant { file: "models/src/generate/time_stamps.rs", from: "stamps.iter().sum::<f64>() >", to: "stamps.iter().copied().fold(0.0, f64::max) >", test: COMPARED },
    Mutant { file: "models/src/files/mxfp4.rs", from: "(4 * (place % 2)) & 15", to: "(4 * (1 - place % 2)) & 15", test: READ },
    Mutant { file: "models/src/files/woven.rs", from: "at.saturating_sub(part).div_ceil(count)", to: "at.div_ceil(count)", test: READ },
    Mutant { file: "models/src/files/woven.rs", from: "at.clamp(part * rows, (part + 1) * rows) - part * rows", to: "at.min(rows)", test: READ },
    Mutant { file: "models/src/files/gguf.rs", from: " - offset).to_le_bytes()", to: ").to_le_bytes()", test: READ },
    Mutant { file: "models/src/config/gguf/families.rs", from: r#""rope_theta": local"#, to: r#""rope_theta": 10_000.0"#, test: READ },
    Mutant { file: "models/src/convert/gguf.rs", from: r#"GgufForm { interleaved: true, ..form("smollm3", "smollm3") }"#, to: r#"form("smollm3", "smollm3")"#, test: READ },
    Mutant { file: "models/src/config/decoder.rs", from: "mixtures.layers.truncate(self.layers)", to: "mixtures.layers.truncate(0)", test: READ },
    Mutant { file: "nn/src/layers/linear.rs", from: "(rows.start * here).checked_div(rows.len())", to: "Some(rows.start * 0 * here)", test: SCORES },
    Mutant { file: "nn/src/parallel/cuts.rs", from: "(Cuts::Shared, TensorStyle::Column) => whole(),", to: "(Cuts::Shared, TensorStyle::Column) => Ok((TensorPlacement::whole(shape), 1)),", test: SCORES },
    Mutant { file: "models/src/decoder/inputs.rs", from: "if has_scores { Some([positions.clone(), moved(&keys)?]) } else { None }", to: "None", test: SCORES },
    Mutant { file: "models/src/decoder/inputs.rs", from: "let asks = has_scores && !cache.is_plain();", to: "let asks = false;", test: SCORES },
    Mutant { file: "models-import/src/onnx/ops/norms.rs", from: "new_variance.mul((count - 1) as f64 / count as f64)?", to: "new_variance", test: IMPORTED },
    Mutant { file: "models-import/src/onnx/ops/norms.rs", from: "if c.is_training() && ratio != 0.0 {", to: "if ratio != 0.0 {", test: IMPORTED },
    Mutant { file: "models-import/src/onnx/ops/recurrent.rs", from: "let t = if backward { steps - 1 - i } else { i };", to: "let t = i;", test: IMPORTED },
    Mutant { file: "models-import/src/onnx/build.rs", from: "role.running |= running;", to: "role.weight |= running;", test: IMPORTED },
    Mutant { file: "models-import/src/onnx/tensor.rs", from: "Component::Normal(_) | Component::CurDir", to: "Component::Normal(_) | Component::ParentDir", test: IMPORTED },
];
