//! Fused operations, with every option.

use autograd::Var;
use numcore::{
    Result, Runtime,
    fused::{AttentionProgram, CrossEntropyOptions, NnOps, Reduction, RopeOptions, SdpaOptions},
    ops::ViewOps,
};

use crate::suite::{
    case::{OpCase, case},
    sample::{Sample, centered, index, indices, real},
};

pub(super) fn cases<R: Runtime>() -> Vec<OpCase<R>> {
    let mut cases = softmax();
    cases.extend(cross_entropy());
    cases.extend(norms());
    cases.extend(attention());
    cases.into_iter().map(|c| c.slack(8.0)).collect()
}

fn softmax<R: Runtime>() -> Vec<OpCase<R>> {
    vec![
        case("softmax -1", [centered(&[3, 5])], |x| x[0].softmax(-1)),
        case("softmax 0", [centered(&[3, 2, 2])], |x| x[0].softmax(0)),
        case("softmax of one", [centered(&[3, 1])], |x| x[0].softmax(-1)).once(),
        case("softmax of large values", [real(&[2, 4], 995.0, 1000.0)], |x| x[0].softmax(-1)),
        case("log_softmax -1", [centered(&[3, 5])], |x| x[0].log_softmax(-1)),
        case("log_softmax 1", [centered(&[2, 3, 2])], |x| x[0].log_softmax(1)),
    ]
}

fn cross_entropy<R: Runtime>() -> Vec<OpCase<R>> {
    const PLAIN: CrossEntropyOptions =
        CrossEntropyOptions { ignore_index: -100, label_smoothing: 0.0, reduction: Reduction::Mean };
    let rows = || [centered(&[4, 5]), index(&[4], 5)];
    let some_ignored = || [centered(&[4, 5]), indices(&[4], &[3, -100, 0, -100])];
    let weighted = || [centered(&[4, 5]), index(&[4], 5), real(&[5], 0.2, 2.0).fixed()];
    vec![
        case("cross_entropy", rows(), |x| x[0].cross_entropy_with(&x[1], PLAIN)),
        case("cross_entropy sum", rows(), |x| {
            x[0].cross_entropy_with(&x[1], CrossEntropyOptions { reduction: Reduction::Sum, ..PLAIN })
        }),
        case("cross_entropy none", rows(), |x| {
            x[0].cross_entropy_with(&x[1], CrossEntropyOptions { reduction: Reduction::None, ..PLAIN })
        }),
        case("cross_entropy ignoring", some_ignored(), |x| x[0].cross_entropy_with(&x[1], PLAIN)),
        case("cross_entropy ignoring a class", rows(), |x| {
            x[0].cross_entropy_with(&x[1], CrossEntropyOptions { ignore_index: 2, reduction: Reduction::Sum, ..PLAIN })
        }),
        case("cross_entropy smoothed", rows(), |x| {
            x[0].cross_entropy_with(&x[1], CrossEntropyOptions { label_smoothing: 0.2, ..PLAIN })
        }),
        case("cross_entropy smoothed, ignoring", some_ignored(), |x| {
            x[0].cross_entropy_with(&x[1], CrossEntropyOptions { label_smoothing: 0.2, ..PLAIN })
        }),
        case("cross_entropy weighted", weighted(), |x| x[0].weighted_cross_entropy(&x[1], &x[2], PLAIN)),
        case("cross_entropy weighted, smoothed", weighted(), |x| {
            x[0].weighted_cross_entropy(&x[1], &x[2], CrossEntropyOptions { label_smoothing: 0.3, ..PLAIN })
        }),
        case("cross_entropy with weights that learn", [centered(&[3, 4]), index(&[3], 4), real(&[4], 0.5, 2.0)], |x| {
            x[0].weighted_cross_entropy(&x[1], &x[2], CrossEntropyOptions { label_smoothing: 0.1, ..PLAIN })
        }),
        case("cross_entropy of large logits", [real(&[3, 4], 500.0, 505.0), index(&[3], 4)], |x| {
            x[0].cross_entropy_with(&x[1], PLAIN)
        }),
    ]
}

fn norms<R: Runtime>() -> Vec<OpCase<R>> {
    let affine = |shape: &[usize], width: usize| [centered(shape), real(&[width], 0.5, 1.5), centered(&[width])];
    vec![
        case("layer_norm", affine(&[3, 5], 5), |x| x[0].layer_norm(Some(&x[1]), Some(&x[2]), 1e-5)),
        case("layer_norm weight", affine(&[2, 2, 4], 4)[..2].to_vec(), |x| x[0].layer_norm(Some(&x[1]), None, 1e-5)),
        case("layer_norm bias", [centered(&[3, 4]), centered(&[4])], |x| x[0].layer_norm(None, Some(&x[1]), 1e-5)),
        case("layer_norm plain", [centered(&[3, 4])], |x| x[0].layer_norm(None, None, 0.1)),
        case("rms_norm", affine(&[3, 5], 5)[..2].to_vec(), |x| x[0].rms_norm(Some(&x[1]), 1e-6)),
        case("rms_norm plain", [centered(&[2, 3, 4])], |x| x[0].rms_norm(None, 0.1)),
        case("group_norm", affine(&[2, 4, 3], 4), |x| x[0].group_norm(2, Some(&x[1]), Some(&x[2]), 1e-5)),
        case("group_norm of images", affine(&[2, 4, 2, 2], 4), |x| x[0].group_norm(4, Some(&x[1]), Some(&x[2]), 1e-5)),
        case("group_norm plain", [centered(&[2, 4, 3])], |x| x[0].group_norm(1, None, None, 1e-5)),
        case("batch_norm_train", affine(&[3, 2, 2, 2], 2), |x| {
            Ok(x[0].batch_norm_train(Some(&x[1]), Some(&x[2]), 1e-5)?.0)
        }),
        case("batch_norm_train of rows", affine(&[5, 3], 3), |x| {
            Ok(x[0].batch_norm_train(Some(&x[1]), Some(&x[2]), 1e-5)?.0)
        }),
        case(
            "batch_norm",
            [centered(&[3, 2, 2]), centered(&[2]), real(&[2], 0.5, 2.0), real(&[2], 0.5, 1.5), centered(&[2])],
            |x| x[0].batch_norm(&x[1], &x[2], Some(&x[3]), Some(&x[4]), 1e-5),
        ),
        case("rope", [centered(&[2, 3, 4])], |x| x[0].rope(100.0, 0)).once(),
        case("rope of neighbours", [centered(&[2, 3, 4])], |x| {
            x[0].rope_with(RopeOptions { base: 100.0, interleaved: true, start: 2, ..RopeOptions::default() })
        })
        .once(),
        case("rope of a part", [centered(&[2, 1, 3, 6])], |x| {
            x[0].rope_with(RopeOptions { base: 100.0, dim: Some(4), ..RopeOptions::default() })
        })
        .once(),
        case("rope at positions", [centered(&[2, 2, 3, 4]), indices(&[2, 3], &[0, 4, 1, 2, 2, 3])], |x| {
            x[0].rope_with(RopeOptions { positions: Some(&x[1]), ..RopeOptions::default() })
        })
        .once(),
        case("rotate", [centered(&[2, 3, 4]), centered(&[3, 2]), centered(&[3, 2])], |x| {
            x[0].rotate(&x[1], &x[2], false)
        }),
        case("rope from a position", [centered(&[1, 2, 3, 6])], |x| x[0].rope(10_000.0, 5)).once(),
    ]
}

/// Queries, keys and values.
fn qkv(b: usize, h: usize, k: usize, [t, s]: [usize; 2], d: usize) -> Vec<Sample> {
    vec![centered(&[b, h, t, d]), centered(&[b, k, s, d]), centered(&[b, k, s, d])]
}

fn attend<R: Runtime>(x: &[Var<R>], mask: Option<&Var<R>>, causal: bool) -> Result<Var<R>> {
    x[0].attention_with(&x[1], &x[2], SdpaOptions { mask, causal, ..Default::default() })
}

fn attention<R: Runtime>() -> Vec<OpCase<R>> {
    let with = |mut inputs: Vec<Sample>, mask: Sample| {
        inputs.push(mask);
        inputs
    };
    vec![
        case("attention by a mask of positions", qkv(1, 2, 1, [5, 4], 2), |x| {
            let program = AttentionProgram::over(0).mask(|at, _| (at.key / 2).eq(at.query / 2) | at.head.eq(1));
            program.attend(&x[0], &x[1], &x[2], &[])
        }),
        case("attention by an added value", with(qkv(1, 2, 1, [3, 4], 2), centered(&[2, 1, 1])), |x| {
            let program = AttentionProgram::over(1)
                .score(|s, at, args| s + args[0] * (at.key - at.query).cast_like(s))
                .mask(|at, _| at.key.le(at.query));
            program.attend(&x[0], &x[1], &x[2], &[&x[3]])
        }),
        case("attention by a function of scores", with(qkv(2, 2, 2, [3, 3], 2), centered(&[2, 1, 1, 3])), |x| {
            let program = AttentionProgram::over(1).score(|s, _, args| (s * args[0]).tanh() + s);
            program.attend(&x[0], &x[1], &x[2], &[&x[3]])
        }),
        case("attention", qkv(1, 2, 2, [3, 3], 2), |x| attend(x, None, false)),
        case("attention causal", qkv(2, 1, 1, [4, 4], 2), |x| attend(x, None, true)),
        case("attention grouped", qkv(1, 4, 2, [3, 3], 2), |x| attend(x, None, false)),
        case("attention grouped, causal", qkv(1, 4, 1, [3, 3], 2), |x| attend(x, None, true)),
        case("attention across", qkv(1, 2, 1, [2, 5], 3), |x| attend(x, None, false)),
        case("attention across, causal", qkv(1, 1, 1, [2, 4], 2), |x| attend(x, None, true)),
        case("attention to a longer past, causal", qkv(1, 1, 1, [5, 3], 2), |x| attend(x, None, true)),
        case("attention masked", with(qkv(2, 2, 2, [3, 3], 2), centered(&[2, 1, 3, 3]).fixed()), |x| {
            attend(x, Some(&x[3]), false)
        }),
        case("attention masked, causal", with(qkv(1, 2, 1, [3, 3], 2), centered(&[3, 3]).fixed()), |x| {
            attend(x, Some(&x[3]), true)
        }),
        case("attention with a mask that learns", with(qkv(1, 2, 2, [3, 3], 2), centered(&[2, 3, 3])), |x| {
            attend(x, Some(&x[3]), false)
        }),
        case("attention capped", qkv(1, 2, 1, [3, 4], 2), |x| {
            x[0].attention_with(&x[1], &x[2], SdpaOptions { softcap: Some(0.6), ..SdpaOptions::default() })
        }),
        case("attention in a window", qkv(1, 2, 1, [5, 5], 2), |x| {
            x[0].attention_with(&x[1], &x[2], SdpaOptions { window: (Some(1), Some(1)), ..SdpaOptions::default() })
        }),
        case("attention after a cache, in a window, capped", qkv(1, 2, 1, [3, 6], 2), |x| {
            let window = (Some(2), None);
            let softcap = Some(0.9);
            let options = SdpaOptions { causal: true, window, lower_right: true, softcap, ..SdpaOptions::default() };
            x[0].attention_with(&x[1], &x[2], options)
        }),
        case("attention of too many queries, from the end", qkv(1, 1, 1, [5, 3], 2), |x| {
            let options = SdpaOptions { causal: true, lower_right: true, ..SdpaOptions::default() };
            x[0].attention_with(&x[1], &x[2], options)
        }),
        case("attention scaled", qkv(1, 1, 1, [3, 3], 2), |x| {
            x[0].attention_with(&x[1], &x[2], SdpaOptions { scale: Some(2.0), ..Default::default() })
        }),
        case(
            "attention with other values",
            [centered(&[1, 1, 3, 2]), centered(&[1, 1, 4, 2]), centered(&[1, 1, 4, 3])],
            |x| attend(x, None, false),
        ),
        case(
            "attention of transposed heads",
            [centered(&[1, 3, 2, 2]), centered(&[1, 3, 2, 2]), centered(&[1, 3, 2, 2])],
            |x| {
                let heads = |v: &Var<R>| v.transpose(1, 2);
                heads(&x[0])?.causal_attention(&heads(&x[1])?, &heads(&x[2])?)?.transpose(1, 2)
            },
        ),
    ]
}
