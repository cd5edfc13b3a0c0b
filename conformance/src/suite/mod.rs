//! The suite: the tests that every runtime must pass, in sections.

mod attend;
mod case;
mod cases;
mod chains;
mod close;
mod determinism;
mod dtypes;
mod empty;
mod errors;
mod fuzz;
mod gradcheck;
mod handle;
mod kernels;
mod loops;
mod misuse;
mod numerics;
mod placements;
mod positions;
mod programs;
mod references;
mod report;
mod sample;
mod scored_kernels;
mod sizes;
mod tangents;
mod tests;
mod ulp;
mod values;

use numcore::Runtime;

pub use determinism::determinism;
pub use references::folder as goldens;
pub use report::{Report, Section, Verdict};

/// Runs every section on a runtime. [`determinism`] needs several runtimes and is called separately.
pub fn run<R: Runtime>(rt: &R) -> Report {
    let sections = sections::<R>().into_iter().map(|(_, run)| run(rt));
    Report { sections: sections.collect() }
}

/// A function that runs one section.
pub type RunSection<R> = fn(&R) -> Section;

/// The sections by name, to run them one by one.
pub fn sections<R: Runtime>() -> Vec<(&'static str, RunSection<R>)> {
    vec![
        ("references", references::references),
        ("gradients", gradcheck::first),
        ("second derivatives", gradcheck::second),
        ("tangents", tangents::tangents),
        ("views", placements::views),
        ("repeated axes", placements::repeated),
        ("slots", placements::slots),
        ("narrow types", dtypes::narrow),
        ("fused kernels", kernels::kernels),
        ("attention and positions", attend::attend),
        ("sizes", sizes::sizes),
        ("functions", loops::functions),
        ("copies and casts", loops::copies),
        ("outputs", loops::outputs),
        ("program layouts", loops::program_layouts),
        ("reductions", loops::reduce),
        ("softmax", loops::softmax),
        ("index", loops::index),
        ("scans and sorts", loops::order),
        ("matmul", loops::matmul),
        ("windows", loops::windows),
        ("geometry", fuzz::fuzz),
        ("chains", chains::chains),
        ("values", values::values),
        ("numerics", numerics::numerics),
        ("handle", handle::handle),
        ("programs", programs::programs),
        ("exactness", ulp::ulps),
        ("empty tensors", empty::empty),
        ("errors", errors::errors),
        ("misuse", misuse::misuse),
    ]
}

/// The names of the sections, in their order.
pub fn section_names() -> Vec<&'static str> {
    sections::<numcore::NullRuntime>().into_iter().map(|(name, _)| name).collect()
}
