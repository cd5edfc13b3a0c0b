//! Cross-entropy of rows with integer classes, and its gradient. A class out of range is reported like an index.

use numcore::{
    Result, Support,
    fused::{CrossEntropy, CrossEntropyGrad},
};
use smallvec::{SmallVec, smallvec};

use super::{
    FusedCall,
    rows::{Along, RowFrame, RowKernel, number, read},
    softmax::total,
};
use crate::{bindings::OperandView, queue::IndexCheck};

pub(super) fn forward(call: &FusedCall<'_, '_>, op: &CrossEntropy) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let mut operands: SmallVec<[(OperandView<'_>, Along); 8]> =
        smallvec![(call.ins[CrossEntropy::LOGITS], Along::Both), (call.ins[CrossEntropy::TARGETS], Along::Rows)];
    operands.extend(call.ins.get(CrossEntropy::WEIGHT).map(|w| (*w, Along::Columns)));
    let loss = operands.len();
    operands.extend(call.outs.iter().map(|p| (*p, Along::Rows)));
    let numbers = numbers(call, op, width);
    let launch = RowKernel {
        op: "cross_entropy",
        kind: "cross_entropy",
        operands: &operands,
        outputs: loss,
        rows,
        width,
        numbers: &numbers,
        details: &[u32::from(op.weighted) | u32::from(op.label_smoothing != 0.0) << 1],
        indexed: true,
    };
    launch.run(call.wgpu, |f| {
        let class = class(f, 1, op.weighted.then_some(2));
        let x = f.load(0);
        let (w, all) = if op.weighted { (f.load(2), &[0, 2][..]) } else { ("1f".into(), &[0][..]) };
        let spread = if op.label_smoothing != 0.0 {
            format!(
                "var joint = 0f;\nvar weighted = 0f;\n{}let joints = all_sum(local, joint);\nlet sums = all_sum(local, weighted);\n\
                 value = value * target_share + (shift * joints - sums) * other_share;\n",
                f.columns(all, &format!("joint += {w};\nweighted += ({x} - top) * {w};\n"))
            )
        } else {
            String::new()
        };
        format!(
            "{class}{}let shift = wg_log(total);\nlet place = {} + row * width + which;\n\
             var value = (shift - ({} - top)) * own;\n{spread}if (ignored) {{ value = 0f; }}\n\
             if (local == 0u) {{\n{}{}{}}}\n",
            total(f, 0),
            f.base(0),
            f.load_at(0, "place"),
            f.store(loss, "value"),
            f.store(loss + 1, "top"),
            f.store(loss + 2, "shift"),
        )
    })?;
    Ok(Support::Done)
}

pub(super) fn backward(call: &FusedCall<'_, '_>, op: &CrossEntropy) -> Result<Support> {
    let (rows, width) = call.rows(0);
    let mut operands: SmallVec<[(OperandView<'_>, Along); 8]> = smallvec![
        (call.ins[CrossEntropyGrad::LOGITS], Along::Both),
        (call.ins[CrossEntropyGrad::TARGETS], Along::Rows),
        (call.ins[CrossEntropyGrad::TOP], Along::Rows),
        (call.ins[CrossEntropyGrad::LOG_SUM], Along::Rows),
        (call.ins[CrossEntropyGrad::GRAD], Along::Rows)
    ];
    operands.extend(call.ins.get(CrossEntropyGrad::WEIGHT).map(|w| (*w, Along::Columns)));
    let d = operands.len();
    operands.push((call.outs[0], Along::Both));
    let numbers = numbers(call, op, width);
    let launch = RowKernel {
        op: "cross_entropy_grad",
        kind: "cross_entropy_grad",
        operands: &operands,
        outputs: d,
        rows,
        width,
        numbers: &numbers,
        details: &[u32::from(op.weighted) | u32::from(op.label_smoothing != 0.0) << 1],
        indexed: true,
    };
    launch.run(call.wgpu, |f| {
        let class = class(f, 1, op.weighted.then_some(5));
        let (x, w) = (f.load(0), if op.weighted { f.load(5) } else { "1f".into() });
        let smooth = op.label_smoothing != 0.0;
        let joints = match (smooth, op.weighted) {
            (false, _) => "let joints = 0f;\n".into(),
            (true, false) => "let joints = f32(width);\n".to_owned(),
            (true, true) => {
                let sum = f.columns(&[5], &format!("joint += {w};\n"));
                format!("var joint = 0f;\n{sum}let joints = all_sum(local, joint);\n")
            }
        };
        let each = format!(
            "var d = wg_exp(({x} - top) - shift) * (mine + other_share * joints);\n{}if (c == which) {{ d -= mine; }}\n\
             d = select(d * g, 0f, ignored);\n{}",
            if smooth { format!("d -= other_share * {w};\n") } else { String::new() },
            f.store(d, "d"),
        );
        let all: &[usize] = if op.weighted { &[0, 5, d] } else { &[0, d] };
        format!(
            "{class}{joints}let top = {};\nlet shift = {};\nlet g = {};\nlet mine = own * target_share;\n{}",
            f.load(2),
            f.load(3),
            f.load(4),
            f.columns(all, &each)
        )
    })?;
    Ok(Support::Done)
}

/// The launch parameters: the ignored class, the smoothing weights of the target and of every class, the ticket's
/// complement.
fn numbers(call: &FusedCall<'_, '_>, op: &CrossEntropy, width: usize) -> [u32; 5] {
    let ticket = call.wgpu.queue.ticket(IndexCheck { op: "cross_entropy", size: width });
    let ignored = op.ignore_index as u64;
    let (target, other) = (number(1.0 - op.label_smoothing), number(op.label_smoothing / width as f64));
    [ignored as u32, (ignored >> 32) as u32, target, other, !ticket]
}

/// Statements for the class `which` of the row (0 where it is `ignored` or out of range), its weight `own`, and the
/// smoothing weights.
fn class(f: &mut RowFrame<'_>, target: usize, weight: Option<usize>) -> String {
    let (low, high) = (f.params.next(), f.params.next());
    let (share, other) = (read(&mut f.params), read(&mut f.params));
    let ticket = f.params.next();
    let (y, flag) = (f.load(target), f.flag);
    let own = weight.map_or("let own = 1f;\n".into(), |w| {
        format!("let own_at = {} + which;\nlet own = {};\n", f.base(w), f.load_at(w, "own_at"))
    });
    format!(
        "let y = {y};\nlet ignored = y.x == {low} && y.y == {high};\nlet known = y.y == 0u && y.x < width;\n\
         if (!known && !ignored && local == 0u) {{ atomicMax(&buf{flag}[0], {ticket}); }}\n\
         let which = select(0u, y.x, known);\n\
         let target_share = {share};\nlet other_share = {other};\n{own}"
    )
}
