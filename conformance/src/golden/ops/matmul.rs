//! Matrix products of the op tables.

use numcore::{
    Runtime,
    ops::{MatmulOps, PointwiseOps, ViewOps, einsum},
};

use crate::golden::call::{OpFn, one};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OpFn<R>> {
    let row: OpFn<R> = match op {
        "matmul" | "mm" | "bmm" | "mv" | "dot" => |c| one(c.x(0)?.matmul(c.x(1)?)),
        "matmul_tn" => |c| one(c.x(0)?.t()?.matmul(c.x(1)?)),
        "matmul_nt" => |c| one(c.x(0)?.matmul(&c.x(1)?.t()?)),
        "matmul_tt" => |c| one(c.x(0)?.t()?.matmul(&c.x(1)?.t()?)),
        "outer" => |c| one(c.x(0)?.unsqueeze(1)?.matmul(&c.x(1)?.unsqueeze(0)?)),
        "addmm" | "baddbmm" => |c| {
            let product = c.x(1)?.matmul(c.x(2)?)?.mul(c.attrs.f64("alpha", 1.0)?)?;
            one(c.x(0)?.mul(c.attrs.f64("beta", 1.0)?)?.add(&product))
        },
        "linear" => |c| one(c.x(0)?.linear(c.x(1)?, c.maybe(2))),
        "einsum" => |c| one(einsum(c.attrs.str("equation", "")?, &c.all())),
        _ => return None,
    };
    Some(row)
}
