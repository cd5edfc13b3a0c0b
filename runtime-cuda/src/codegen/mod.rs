//! Code generation of CUDA C: kernels around printed programs.
//!
//! A source is complete: the prelude, the kernel's own types, one `extern "C"` entry. Parameters are single values in a
//! fixed order that the launcher repeats ([`Args`](crate::args::Args)).

pub(crate) mod form;
pub(crate) mod pointwise;
pub(crate) mod reduce;
#[cfg(all(test, feature = "nvrtc-tests"))]
mod tests;

use numcore::DType;

/// What every generated kernel begins with.
pub(crate) const PRELUDE: &str = include_str!("prelude.cuh");

/// Threads of a block of a generated kernel.
pub(crate) const THREADS: u32 = 256;

/// A kernel's source, and the entry function in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KernelSource {
    pub text: String,
    pub entry: String,
    /// Whether the compiler may round a product and a sum of it once, as a fused multiply-add. In generated kernels it
    /// may not: which of two products is fused would depend on what else a kernel computes.
    pub contracts: bool,
}

/// The type of an element in memory.
pub(crate) fn stored(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "wg_half",
        DType::BF16 => "wg_bfloat",
        DType::Bool => "wg_truth",
        other => computed(other),
    }
}

/// What an element is computed in; as the printer of programs names it.
pub(crate) fn computed(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => "float",
        DType::F64 => "double",
        DType::I32 => "int",
        DType::I64 => "i64",
        DType::U32 => "u32",
        DType::U8 => "u8",
        DType::Bool => "bool",
    }
}

/// A kernel's name: that of its program, for profilers and messages.
pub(crate) fn entry(family: &str, program: &str) -> String {
    let plain = program.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' });
    format!("{family}_{}", plain.collect::<String>())
}
