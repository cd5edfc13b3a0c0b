//! Products that an emulated library refuses on request, so that what is done instead can be tested.

use super::super::CublasGemm;

/// What an emulated library refuses, as cuBLASLt refuses what it has no algorithm for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmRefusal {
    /// What cuBLASLt refuses, and nothing else.
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
    pub(super) fn refuses(self, gemm: &CublasGemm, workspace: usize) -> bool {
        let aligned = |leading: usize| (leading * gemm.dtype.size()).is_multiple_of(16);
        match self {
            GemmRefusal::Nothing => false,
            GemmRefusal::Workspace => workspace > 0,
            GemmRefusal::Unaligned => {
                [&gemm.a, &gemm.b, &gemm.d].iter().any(|side| side.aligned < 16 || !aligned(side.leading))
            }
            GemmRefusal::Everything => true,
        }
    }
}
