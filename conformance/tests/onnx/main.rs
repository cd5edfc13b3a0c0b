//! The node tests of ONNX's backend suite, as modules of `models_import`, and the list of what is not supported, with
//! the reasons.
//!
//! `WEFTGRAD_TEST_ONNX` is a part of the names of the cases to run; `WEFTGRAD_TEST_ONNX_FILE` is another file of cases,
//! as seen from the workspace's folder.

mod file;

use std::{
    collections::{BTreeSet, HashMap},
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
};

use autograd::Var;
use file::{Answer, Cases, unsupported};
use models_import::OnnxModel;
use nn::{ModuleExt, Stage};
use numcore::{DType, Tensor};
use runtime_cpu::Cpu;
use serde_json::Value;

/// How many of the suite's cases must be executed, and right.
const LEAST: usize = 1500;

/// Every case is right, or listed with the reason why not; and nothing that is listed is right.
#[test]
fn cases_are_right_or_listed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("onnx");
    let remade = std::env::var("WEFTGRAD_TEST_ONNX_FILE").map(|file| folder.join("../..").join(file));
    let cases = Cases::read(&remade.unwrap_or(folder.join("cases.zlib"))).expect("the file of cases");
    let text = std::fs::read_to_string(folder.join("unsupported.txt")).expect("the list");
    let listed = unsupported(&text);
    let only = std::env::var("WEFTGRAD_TEST_ONNX").unwrap_or_default();
    let (mut right, mut failures, mut stale) = (0, Vec::new(), Vec::new());
    for case in cases.list.iter().filter(|case| name(case).contains(&only)) {
        match (outcome(&cases, case), listed.get(name(case))) {
            (Ok(()), None) => right += 1,
            (Ok(()), Some(_)) => stale.push(name(case)),
            (Err(why), None) => failures.push(format!("{}: {why}", name(case))),
            (Err(_), Some(_)) => {}
        }
    }
    println!("{right} of {} cases are right, {} are listed", cases.list.len(), listed.len());
    assert!(failures.is_empty(), "{} cases failed:\n{}", failures.len(), failures.join("\n"));
    assert!(stale.is_empty(), "listed, but right: {stale:?}");
    let known: BTreeSet<&str> = cases.list.iter().map(name).collect();
    let unknown: HashMap<_, _> = listed.iter().filter(|(name, _)| !known.contains(*name)).collect();
    assert!(unknown.is_empty(), "the suite does not have {unknown:?}");
    assert!(right >= LEAST || !only.is_empty(), "{right} cases are right");
}

fn name(case: &Value) -> &str {
    case["name"].as_str().unwrap_or_default()
}

/// Runs a case and compares its outputs.
fn outcome(cases: &Cases, case: &Value) -> Result<(), String> {
    if let Some(why) = case["left_out"].as_str() {
        return Err(format!("is not in the file for {why}"));
    }
    match catch_unwind(AssertUnwindSafe(|| run(cases, case))) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("panicked".into()),
    }
}

fn run(cases: &Cases, case: &Value) -> Answer<()> {
    let model = OnnxModel::from_bytes(cases.model(&case["model"])?, cases.cpu())?;
    // The suite's cases with batch norms that train say so in their names.
    model.set_training(name(case).contains("training_mode"));
    let ins: Vec<_> = cases.tensors(&case["ins"])?.into_iter().map(Var::new).collect();
    let outs = model.forward_values(&ins)?.iter().map(Var::value).collect::<numcore::Result<Vec<_>>>()?;
    let expected = cases.tensors(&case["outs"])?;
    if outs.len() < expected.len() {
        return Err(format!("{} outputs instead of {}", outs.len(), expected.len()).into());
    }
    let [rtol, atol] = ["rtol", "atol"].map(|key| case[key].as_f64().unwrap_or_default());
    outs.iter().zip(&expected).enumerate().try_for_each(|(k, (out, expected))| {
        compare(out, expected, rtol, atol).map_err(|why| format!("output {k}: {why}").into())
    })
}

/// NumPy's `assert_allclose`, as the suite uses it; but halves may differ by a unit in the last place, and values near 0 by
/// the rounding errors of terms near 1.
fn compare(out: &Tensor<Cpu>, expected: &Tensor<Cpu>, rtol: f64, atol: f64) -> Answer<()> {
    if (out.dims(), out.dtype()) != (expected.dims(), expected.dtype()) {
        return Err(
            format!("{} {:?} instead of {} {:?}", out.dtype(), out.dims(), expected.dtype(), expected.dims()).into()
        );
    }
    if matches!(out.dtype(), DType::I64) && out.to_vec::<i64>()? != expected.to_vec::<i64>()? {
        return Err(format!("{:?} instead of {:?}", out.to_vec::<i64>()?, expected.to_vec::<i64>()?).into());
    }
    let rtol = if out.dtype().is_float() { rtol.max(out.dtype().epsilon()) } else { 0.0 };
    let atol = if out.dtype().is_float() { atol.max(2.0 * out.dtype().epsilon()) } else { 0.0 };
    for (i, (x, y)) in out.to_f64s()?.into_iter().zip(expected.to_f64s()?).enumerate() {
        let near = y.is_finite() && (x - y).abs() <= atol + rtol * y.abs();
        let same = x == y || (x.is_nan() && y.is_nan()) || near;
        if !same {
            return Err(format!("element {i} of {:?} is {x} instead of {y}", out.dims()).into());
        }
    }
    Ok(())
}
