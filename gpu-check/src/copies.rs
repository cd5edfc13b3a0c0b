//! The speed of copies.

use std::time::Instant;

use weftgrad::{
    DType, Result, Runtime, Tensor,
    ops::{MatmulOps, PointwiseOps},
};

use crate::report::Found;

pub(crate) fn run<R: Runtime>(rt: &R, item: &str, quick: bool) -> Result<Found> {
    if item == "overlap" { overlap(rt, quick) } else { bandwidth(rt, quick) }
}

const ROUNDS: usize = 7;

/// The median time of some rounds, in seconds.
fn median(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    run()?;
    let mut all = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        run()?;
        all.push(start.elapsed().as_secs_f64());
    }
    all.sort_by(f64::total_cmp);
    Ok(all[ROUNDS / 2])
}

fn bandwidth<R: Runtime>(rt: &R, quick: bool) -> Result<Found> {
    let bytes: usize = if quick { 1 << 20 } else { 256 << 20 };
    let values = vec![1f32; bytes / 4];
    let up = median(|| {
        let _x = Tensor::from_slice(rt, [values.len()], &values)?;
        rt.synchronize()
    })?;
    let x = Tensor::from_slice(rt, [values.len()], &values)?;
    let down = median(|| x.to_vec::<f32>().map(drop))?;
    let one = Tensor::from_slice(rt, [1], &[1f32])?;
    let item = median(|| one.add(1.0)?.item().map(drop))?;
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    let found = Found::default().with("upload_gb_s", rate(up)).with("download_gb_s", rate(down));
    Ok(found.with("kernel_and_item_us", item * 1e6))
}

/// Times GEMMs alone, an upload alone, and both at once.
fn overlap<R: Runtime>(rt: &R, quick: bool) -> Result<Found> {
    let (n, products) = if quick { (128, 2) } else { (8192, 20) };
    let dtype = if quick { DType::F32 } else { DType::BF16 };
    let a = Tensor::uniform(rt, [n, n], DType::F32, -1.0, 1.0, 1)?.to_dtype(dtype)?;
    let batch = vec![1f32; 1 << 20];
    let compute = || (0..products).try_for_each(|_| a.matmul(&a).map(drop));
    let upload = || Tensor::from_slice(rt, [batch.len()], &batch).map(drop);
    let computed = median(|| compute().and_then(|()| rt.synchronize()))?;
    let copied = median(|| upload().and_then(|()| rt.synchronize()))?;
    let both = median(|| compute().and_then(|()| upload()).and_then(|()| rt.synchronize()))?;
    let found = Found::default().with("products_ms", computed * 1e3).with("upload_ms", copied * 1e3);
    Ok(found.with("both_ms", both * 1e3))
}
