//! Narrow types against `f64`: the same inputs, rounded to the narrow type first, must give nearly the same results.

use numcore::{DType, Runtime};

use super::{
    case::OpCase,
    cases,
    close::{agree, forward_backward, rounded},
    report::Section,
};

/// How many spacings of the type a result may be off, at the scale of its tensor's largest element. Cases with long sums or
/// cancellation say how many times more.
const SPACINGS: f64 = 6.0;

pub(crate) fn narrow<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("narrow types");
    let has = rt.capabilities();
    if !has.compute.contains(&DType::F64) {
        section.skip("this runtime does not compute in f64, which the others are compared with");
        return section;
    }
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !has.storage.contains(&dtype) {
            section.skip(format!("{dtype} is not stored"));
            continue;
        }
        for case in cases::all::<R>() {
            // Values of half types are too coarse for sums of exponentials of hundreds.
            let coarse = dtype.is_half() && case.inputs.iter().any(|s| s.values().iter().any(|v| v.abs() > 100.0));
            if !coarse {
                section.check(format!("{} {dtype}", case.name), || compare(rt, &case, dtype));
            }
        }
    }
    section
}

fn compare<R: Runtime>(rt: &R, case: &OpCase<R>, dtype: DType) -> numcore::Result<super::report::Verdict> {
    let narrow = case.tensors(rt, dtype)?;
    let wide = case
        .inputs
        .iter()
        .map(|s| {
            s.with(rt, DType::F64, &if s.is_float() { rounded(rt, s.values(), dtype)? } else { s.values().to_vec() })
        })
        .collect::<numcore::Result<Vec<_>>>()?;
    let want = forward_backward(rt, case, &wide)?;
    Ok(agree(&forward_backward(rt, case, &narrow)?, &want, SPACINGS * case.slack * dtype.epsilon()))
}
