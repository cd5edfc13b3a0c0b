//! PyTorch's reference values of this crate, in every placement, and cast to other types.

use std::{
    path::{Path, PathBuf},
    sync::LazyLock,
};

use numcore::{DType, Result, Runtime};

use super::{
    dtypes::{computes, lacks},
    report::{Section, Verdict},
};
use crate::golden::{Case, Options, Outcome, Placement, load, run_case};

/// The folder of reference values: in this crate's folder, or `WEFTGRAD_GOLDENS`, for a program that was built
/// elsewhere.
pub fn folder() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let given = std::env::var_os("WEFTGRAD_GOLDENS").map(PathBuf::from);
        given.unwrap_or_else(|| concat!(env!("CARGO_MANIFEST_DIR"), "/goldens").into())
    });
    &FOLDER
}

pub(crate) fn references<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("reference values");
    let cases = match load(folder(), &[]) {
        Ok(cases) => cases,
        Err(e) => {
            section.check("files", || Err(e));
            return section;
        }
    };
    for case in &cases {
        run(rt, &mut section, case, Options::default());
    }
    let ops = |c: &&Case| !matches!(c.group.as_str(), "lr" | "optim" | "train");
    for case in cases.iter().filter(ops) {
        for placement in Placement::ALL.into_iter().filter(|p| *p != Placement::Dense) {
            run(rt, &mut section, case, Options { placement, dtype: None });
        }
        let types = [DType::F64, DType::BF16, DType::F16];
        for dtype in types.into_iter().filter(|d| rt.capabilities().storage.contains(d) && suits(case, *d)) {
            if !computes(rt, dtype) {
                section.skip(format!("{} {dtype}: {}", case.id, lacks(dtype)));
                continue;
            }
            run(rt, &mut section, case, Options { dtype: Some(dtype), ..Options::default() });
        }
    }
    section
}

/// Tells whether a case suits a dtype. Only cases of `f32` are cast. To half precision only those are cast that do not
/// depend on the order of close values, which may round to equal ones.
fn suits(case: &Case, dtype: DType) -> bool {
    let single = (0..case.count("inputs").unwrap_or(0))
        .all(|i| case.tensor(&format!("in{i}")).is_ok_and(|t| t.dtype == DType::F32 || !t.dtype.is_float()));
    let decides = matches!(
        case.op.as_str(),
        "eq" | "ne"
            | "lt"
            | "le"
            | "gt"
            | "ge"
            | "argmax"
            | "argmin"
            | "sort"
            | "topk"
            | "amax"
            | "amin"
            | "max_pool2d"
            | "maximum"
            | "minimum"
    );
    single && !(dtype.is_half() && decides)
}

fn run<R: Runtime>(rt: &R, section: &mut Section, case: &Case, options: Options) {
    let how = options.dtype.map_or(format!("{:?}", options.placement), |d| d.to_string());
    let what = format!("{} {how}", case.id);
    match run_case(rt, case, options) {
        Outcome::Skipped(why) => section.skip(format!("{what}: {why}")),
        outcome => section.check(what, || -> Result<Verdict> {
            Ok(match &outcome {
                Outcome::Failed(lines) => Verdict::failed(lines.join("; ")),
                _ => Verdict::PASSED,
            })
        }),
    }
}
