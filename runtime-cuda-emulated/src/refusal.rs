//! Products that an emulated library refuses on request, so that the fallbacks can be tested.

use runtime_cuda::driver::CublasGemm;

/// Products that an emulated library refuses, as cuBLASLt refuses products without an algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmRefusal {
    /// Products that cuBLASLt refuses, and no others.
    #[default]
    Nothing,
    /// Algorithms that take a workspace.
    Workspace,
    /// Operands whose rows do not all start at multiples of 16 bytes.
    Unaligned,
    /// Every product.
    Everything,
}

impl GemmRefusal {
    pub(crate) fn refuses(self, gemm: &CublasGemm, workspace: usize) -> bool {
        let aligned = |leading: usize, dtype: numcore::DType| (leading * dtype.size()).is_multiple_of(16);
        match self {
            GemmRefusal::Nothing => false,
            GemmRefusal::Workspace => workspace > 0,
            GemmRefusal::Unaligned => {
                let sides = [(&gemm.a, gemm.dtype), (&gemm.b, gemm.dtype), (&gemm.d, gemm.into)];
                let sides = sides.into_iter().chain(gemm.c.as_ref().map(|c| (c, gemm.into)));
                sides.into_iter().any(|(side, dtype)| side.aligned < 16 || !aligned(side.leading, dtype))
            }
            GemmRefusal::Everything => true,
        }
    }
}
