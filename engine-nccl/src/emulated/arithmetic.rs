//! Collectives on the host memory of all ranks.

use comm::ReduceOp;
use half::{bf16, f16};
use numcore::DType;

use super::super::api::{Elements, Operation};

/// Runs one operation of every rank, in the order of ranks. Returns false if they do not match.
///
/// # Safety
/// The addresses are of host memory of these sizes that nothing else uses.
pub(super) unsafe fn collective(ranks: &[Operation]) -> bool {
    let alike = |a: &Operation, b: &Operation| std::mem::discriminant(a) == std::mem::discriminant(b);
    if !ranks.iter().all(|operation| alike(operation, &ranks[0])) {
        return false;
    }
    // SAFETY: the caller's promise.
    unsafe {
        match ranks[0] {
            Operation::AllReduce { of, op, .. } => {
                let Some(all) = addresses(ranks, |o| match *o {
                    Operation::AllReduce { at, of: own, op: by } if (own, by) == (of, op) => Some(at),
                    _ => None,
                }) else {
                    return false;
                };
                combine(&all, 0, &all, of, op);
            }
            Operation::Reduce { of, op, root, .. } => {
                let Some(all) = addresses(ranks, |o| match *o {
                    Operation::Reduce { at, of: own, op: by, root: to } if (own, by, to) == (of, op, root) => Some(at),
                    _ => None,
                }) else {
                    return false;
                };
                combine(&all, 0, &all[root..=root], of, op);
            }
            Operation::ReduceScatter { of, op, .. } => {
                let Some(all) = addresses(ranks, |o| match *o {
                    Operation::ReduceScatter { from, to, of: own, op: by } if (own, by) == (of, op) => Some((from, to)),
                    _ => None,
                }) else {
                    return false;
                };
                let from: Vec<u64> = all.iter().map(|(from, _)| *from).collect();
                for (rank, (_, to)) in all.iter().enumerate() {
                    combine(&from, rank * of.count * of.dtype.size(), &[*to], of, op);
                }
            }
            Operation::AllGather { bytes, .. } => {
                let Some(all) = addresses(ranks, |o| match *o {
                    Operation::AllGather { from, to, bytes: own } if own == bytes => Some((from, to)),
                    _ => None,
                }) else {
                    return false;
                };
                for (_, to) in &all {
                    for (rank, (from, _)) in all.iter().enumerate() {
                        // In place, a rank's own part is at its destination already.
                        std::ptr::copy(*from as *const u8, (*to as *mut u8).add(rank * bytes), bytes);
                    }
                }
            }
            Operation::Broadcast { bytes, root, .. } => {
                let Some(all) = addresses(ranks, |o| match *o {
                    Operation::Broadcast { at, bytes: own, root: from } if (own, from) == (bytes, root) => Some(at),
                    _ => None,
                }) else {
                    return false;
                };
                for to in all.iter().filter(|to| **to != all[root]) {
                    std::ptr::copy_nonoverlapping(all[root] as *const u8, *to as *mut u8, bytes);
                }
            }
            Operation::Send { .. } | Operation::Recv { .. } => return false,
        }
    }
    true
}

/// A property of every operation; `None` if one lacks it.
fn addresses<T>(ranks: &[Operation], of: impl Fn(&Operation) -> Option<T>) -> Option<Vec<T>> {
    ranks.iter().map(of).collect()
}

/// Combines elements at `from[r] + offset` of all ranks into each of `to`.
///
/// # Safety
/// The addresses are of memory as [`collective`] requires it.
unsafe fn combine(from: &[u64], offset: usize, to: &[u64], of: Elements, op: ReduceOp) {
    let size = of.dtype.size();
    for i in 0..of.count {
        // The order is from the last rank to the first, to differ from the order of ranks.
        // SAFETY: the caller's promise.
        let values = from.iter().rev().map(|at| unsafe { load(*at as usize + offset + i * size, of.dtype) });
        let Some(all) = values.reduce(|all, x| two(op, all, x)) else { return };
        let all = if op == ReduceOp::Avg { all / from.len() as f64 } else { all };
        // SAFETY: as above.
        to.iter().for_each(|at| unsafe { store(*at as usize + i * size, of.dtype, all) });
    }
}

fn two(op: ReduceOp, a: f64, b: f64) -> f64 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Prod => a * b,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
    }
}

/// # Safety
/// An element of this type is there.
unsafe fn load(at: usize, dtype: DType) -> f64 {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F64 => *(at as *const f64),
            DType::F32 => f64::from(*(at as *const f32)),
            DType::F16 => (*(at as *const f16)).to_f64(),
            DType::BF16 => (*(at as *const bf16)).to_f64(),
            DType::I64 => *(at as *const i64) as f64,
            DType::I32 => f64::from(*(at as *const i32)),
            DType::U32 => f64::from(*(at as *const u32)),
            DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 => f64::from(*(at as *const u8)),
        }
    }
}

/// # Safety
/// An element of this type is there, as for [`load`].
unsafe fn store(at: usize, dtype: DType, x: f64) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F64 => *(at as *mut f64) = x,
            DType::F32 => *(at as *mut f32) = x as f32,
            DType::F16 => *(at as *mut f16) = f16::from_f64(x),
            DType::BF16 => *(at as *mut bf16) = bf16::from_f64(x),
            DType::I64 => *(at as *mut i64) = x as i64,
            DType::I32 => *(at as *mut i32) = x as i32,
            DType::U32 => *(at as *mut u32) = x as u32,
            DType::U8 | DType::F8E4M3 | DType::F8E5M2 => *(at as *mut u8) = x as u64 as u8,
            DType::Bool => *(at as *mut u8) = u8::from(x != 0.0),
        }
    }
}
