//! Accesses of kernels to memory, read from their source.

use runtime_cuda::driver::KernelSource;

use crate::tracked_block::Access;

/// The access of a kernel to each of its arguments, according to its source; `None` for one that is no pointer.
pub(crate) fn parameters(source: &KernelSource) -> Vec<Option<Access>> {
    let name = format!("{}(", source.entry);
    let whole = |at: usize| !source.text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    let start = source.text.rmatch_indices(&name).map(|(at, _)| at).find(|at| whole(*at));
    let list = start.and_then(|at| source.text[at + name.len()..].split_once(')')).map_or("", |(list, _)| list);
    let access = |parameter: &str| {
        let (pointee, _) = parameter.split_once('*')?;
        Some(if pointee.split_whitespace().any(|w| w == "const") { Access::Read } else { Access::Write })
    };
    list.split(',').map(access).collect()
}
