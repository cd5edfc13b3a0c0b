//! Orthonormalization of the columns of a matrix.

use std::sync::LazyLock;

use numcore::{
    Result, Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps, ReduceOps, ViewOps, cat},
    pointwise::Program,
};

/// The length below which a column counts as zero: squares of smaller numbers leave the range of `f32`.
const EPSILON: f64 = 1e-18;

static UNIT: LazyLock<Program> = LazyLock::new(|| {
    Program::new("unit", |[x, square], [least]| [square.gt(least).select(x / square.sqrt(), x * 0.0)])
});
static WITHOUT: LazyLock<Program> =
    LazyLock::new(|| Program::new("without", |[x, unit, along], []| [x - unit * along]));

/// Orthonormal columns that span those of `p: [m, r]`, `r <= m`; a column that is zero stays zero.
///
/// Modified Gram–Schmidt, twice. One pass leaves, of a column that depends on earlier ones, rounding error in an
/// arbitrary direction. The second makes that orthogonal too (Giraud, Langou, Rozložník 2005), so no threshold has to
/// detect such columns.
pub(super) fn orthonormal<R: Runtime>(p: &Tensor<R>) -> Result<Tensor<R>> {
    gram_schmidt(&gram_schmidt(p)?)
}

fn gram_schmidt<R: Runtime>(p: &Tensor<R>) -> Result<Tensor<R>> {
    let (mut rest, mut units) = (p.clone(), Vec::new());
    for left in (0..p.dims()[1]).rev() {
        let x = rest.narrow(1, 0, 1)?;
        let unit = x.apply_program(&UNIT, &[&x.square()?.sum_keepdim(&[0])?], &[(EPSILON * EPSILON).into()])?;
        if left > 0 {
            let others = rest.narrow(1, 1, left)?;
            let along = unit.t()?.matmul(&others)?;
            rest = others.apply_program(&WITHOUT, &[&unit, &along], &[])?;
        }
        units.push(unit);
    }
    cat(&units.iter().collect::<Vec<_>>(), 1)
}
