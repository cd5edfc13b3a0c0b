//! Code generation of CUDA C: kernels around printed programs.
//!
//! A source is complete: the prelude, the kernel's own types, one `extern "C"` entry. Parameters are single values in a
//! fixed order that the launcher repeats ([`KernelArgs`](crate::driver::KernelArgs)).

pub(crate) mod form;
pub(crate) mod pointwise;
pub(crate) mod reduce;
pub(crate) mod scores;
#[cfg(all(test, feature = "nvrtc-tests"))]
mod tests;

use numcore::DType;

/// The text with which every generated kernel begins.
pub(crate) const PRELUDE: &str = include_str!("prelude.cuh");

/// The number of threads of a block of a generated kernel.
pub(crate) const THREADS: u32 = 256;

/// A kernel's source, and the entry function in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KernelSource {
    /// The text in CUDA C.
    pub text: String,
    /// The name of the entry function.
    pub entry: String,
    /// True if the compiler may contract a product and a sum of it to a fused multiply-add, rounded once. False for
    /// generated text, a program of scores included: the product that is fused would depend on the rest of a kernel.
    pub contracts: bool,
}

/// The C type of an element in memory.
pub(crate) fn stored(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "wg_half",
        DType::BF16 => "wg_bfloat",
        DType::Bool => "wg_truth",
        other => computed(other),
    }
}

/// The C type in which an element is computed, as the printer of programs names it.
pub(crate) fn computed(dtype: DType) -> &'static str {
    match dtype {
        // No memory of this device has an 8-bit float, and the printer refuses them in programs.
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2 => "float",
        DType::F64 => "double",
        DType::I32 => "int",
        DType::I64 => "i64",
        DType::U32 => "u32",
        DType::U8 => "u8",
        DType::Bool => "bool",
    }
}

/// A kernel's name, made from that of its program, for profilers and messages.
pub(crate) fn entry(family: &str, program: &str) -> String {
    let plain = program.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' });
    format!("{family}_{}", plain.collect::<String>())
}
