//! The ladder: small checks of everything that a device does. Each rung is a separate process, so a failure hides no
//! other. The expected values are the CPU's results for the same inputs.

use weftgrad::{
    Cpu, DType, Result, Runtime, Tensor, Var,
    nn::{Forward, Init, LayerNorm, RmsNorm},
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ViewOps},
    prelude::{NnOps, ScanOps, SortOps},
    rng::Philox,
};

use crate::report::Found;

/// Rungs that compute values.
const COMPUTED: &[&str] = &[
    "upload and download",
    "pointwise",
    "casts",
    "reductions",
    "matmul f32",
    "matmul f64",
    "matmul f16",
    "matmul bf16",
    "softmax",
    "norms",
    "cross-entropy",
    "attention",
    "rows",
    "sort and scan",
    "random",
];
const QUEUE: &str = "second queue";
const OUT_OF_MEMORY: &str = "out of memory";

pub(crate) fn items() -> Vec<String> {
    COMPUTED.iter().copied().chain([QUEUE, OUT_OF_MEMORY]).map(String::from).collect()
}

pub(crate) fn run<R: Runtime>(rt: &R, item: &str) -> Result<Found> {
    match item {
        QUEUE => queue(rt),
        OUT_OF_MEMORY => out_of_memory(rt),
        _ => computed(rt, item),
    }
}

/// Compares a rung's tensors on the device with those on the CPU.
fn computed<R: Runtime>(rt: &R, item: &str) -> Result<Found> {
    let about = rt.capabilities();
    let floats: Vec<DType> = FLOATS.into_iter().filter(|dtype| about.compute.contains(&dtype.compute())).collect();
    let (got, want) = (values(rt, item, &floats)?, values(&Cpu::new(), item, &floats)?);
    let lines = got.iter().zip(&want).enumerate().map(|(k, (got, want))| difference(k, got, want));
    let failures = lines.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    Ok(Found::checks(want.len(), failures).with("name", about.name.clone()).with("memory", about.max_binding))
}

/// Describes a difference of a result from the expected one that exceeds rounding, relative to the largest value;
/// `None` if there is none.
fn difference<R: Runtime>(k: usize, got: &Tensor<R>, want: &Tensor<Cpu>) -> Result<Option<String>> {
    let close = match want.dtype() {
        DType::F64 => 1e-11,
        DType::F32 => 1e-4,
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        _ => 0.0,
    };
    let (spec, got, due) = (format!("{} {}", want.dtype(), want.shape()), got.to_f64s()?, want.to_f64s()?);
    let largest = due.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    // NaN is near no value.
    let is_near = |at: &usize| (got[*at] - due[*at]).abs() <= close * largest;
    if got.len() != due.len() {
        return Ok(Some(format!("result {k} ({spec}) has {} values for {}", got.len(), due.len())));
    }
    let wrong: Vec<usize> = (0..due.len()).filter(|at| !is_near(at)).collect();
    Ok(wrong.first().map(|&at| {
        let (count, all) = (wrong.len(), due.len());
        format!("result {k} ({spec}): {count} values of {all} differ, the first at {at}: {} for {}", got[at], due[at])
    }))
}

/// Values between -2 and 2, equal on every device.
fn data<R: Runtime>(rt: &R, shape: &[usize], dtype: DType, seed: u64) -> Result<Tensor<R>> {
    let mut random = Philox::new(seed, 0);
    let values: Vec<f32> =
        (0..shape.iter().product::<usize>()).map(|_| random.below(4001) as f32 / 1000.0 - 2.0).collect();
    Tensor::from_slice(rt, shape, &values)?.to_dtype(dtype)
}

fn indices<R: Runtime>(rt: &R, count: usize, below: usize) -> Result<Tensor<R>> {
    let mut random = Philox::new(9, 0);
    let values: Vec<i64> = (0..count).map(|_| random.below(below as u64) as i64).collect();
    Tensor::from_slice(rt, [count], &values)
}

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
/// Odd sizes: one, fewer than the threads of a warp, more than those of a block, and many blocks.
const SIZES: [usize; 4] = [1, 31, 257, 100_003];

/// The results of a rung on a device, of the types `floats` alone: those that the checked device computes in.
fn values<R: Runtime>(rt: &R, item: &str, floats: &[DType]) -> Result<Vec<Tensor<R>>> {
    let mut all = Vec::new();
    match item {
        "upload and download" => {
            for dtype in
                [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool]
            {
                let bytes = data(&Cpu::new(), &[1001], DType::F32, 1)?.to_dtype(dtype)?.to_bytes()?;
                all.push(Tensor::from_bytes(rt, [1001].into(), dtype, &bytes)?);
            }
        }
        "pointwise" => {
            for &dtype in floats {
                for n in SIZES {
                    let (x, y) = (data(rt, &[n], dtype, 1)?, data(rt, &[n], dtype, 2)?);
                    all.extend([x.add(&y)?, x.mul(&y)?.sub(0.5)?, x.gelu()?, x.tanh()?]);
                }
                // Stride 0, a transposed operand, a view that begins elsewhere.
                let (x, row) = (data(rt, &[65, 33], dtype, 3)?, data(rt, &[33], dtype, 4)?);
                all.extend([x.add(&row)?, x.t()?.mul(2.0)?.contiguous()?, x.narrow(1, 3, 7)?.exp()?]);
            }
        }
        "casts" => {
            for &from in floats {
                for &to in floats.iter().chain(&[DType::I64]) {
                    all.push(data(rt, &[301], from, 5)?.to_dtype(to)?);
                }
            }
        }
        "reductions" => {
            for &dtype in floats {
                let x = data(rt, &[37, 129, 5], dtype, 6)?;
                all.extend([x.sum(&[1])?, x.amax(&[0])?, x.mean(&[0, 2])?, x.sum(&[0, 1, 2])?]);
                all.push(x.argmax(1)?);
            }
        }
        "softmax" => {
            for &dtype in floats {
                for width in [7, 1000, 5003] {
                    all.push(data(rt, &[9, width], dtype, 7)?.softmax(-1)?);
                }
            }
        }
        "norms" => {
            for &dtype in floats {
                for width in [33, 768] {
                    let init = Init::new(rt, 0).dtype(dtype);
                    let x = Var::leaf("x", data(rt, &[5, 7, width], dtype, 8)?)?;
                    let g = Var::new(data(rt, &[5, 7, width], dtype, 9)?);
                    let (layer, rms) = (LayerNorm::new(&init, width)?, RmsNorm::new(&init, width)?);
                    for y in [layer.forward(&x)?, rms.forward(&x)?] {
                        all.push(y.value()?);
                        let gradients = y.mul(&g)?.sum(&[0, 1, 2])?.backward()?;
                        all.extend(gradients.of(&x).cloned());
                    }
                }
            }
        }
        "cross-entropy" => {
            for vocabulary in [11, 50_257] {
                let x = Var::leaf("x", data(rt, &[6, vocabulary], DType::F32, 10)?)?;
                let loss = x.cross_entropy(&Var::new(indices(rt, 6, vocabulary)?))?;
                all.push(loss.value()?);
                all.extend(loss.backward()?.of(&x).cloned());
            }
        }
        "attention" => {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                for (t, d) in [(5, 16), (67, 64), (130, 128)] {
                    let leaf = |k: u64| Var::leaf("x", data(rt, &[2, 3, t, d], dtype, k)?.mul(0.5)?);
                    let (q, k, v) = (leaf(11)?, leaf(12)?, leaf(13)?);
                    let y = q.causal_attention(&k, &v)?;
                    all.push(y.value()?);
                    let gradients = y.sum(&[0, 1, 2, 3])?.backward()?;
                    for x in [&q, &k, &v] {
                        all.extend(gradients.of(x).cloned());
                    }
                }
            }
        }
        "rows" => {
            for &dtype in floats {
                let (table, at) = (data(rt, &[53, 40], dtype, 14)?, indices(rt, 300, 53)?);
                let rows = table.index_select(0, &at)?;
                all.extend([rows.clone(), table.index_add(0, &at, &rows.mul(0.01)?)?]);
            }
        }
        "sort and scan" => {
            for n in [1, 33, 5000] {
                let x = data(rt, &[3, n], DType::F32, 15)?;
                let (sorted, order) = x.sort(1, false)?;
                all.extend([sorted, order, x.cumsum(1)?]);
            }
        }
        "random" => {
            all.push(Tensor::uniform(rt, [1003], DType::F32, -1.0, 1.0, 16)?);
            all.push(Tensor::bernoulli(rt, [1003], 0.3, 17)?);
        }
        _ => products(rt, item, floats, &mut all)?,
    }
    Ok(all)
}

/// Computes products of one type, with operands in every layout for which the library's call has an option; none of a
/// type that is not among `floats`.
fn products<R: Runtime>(rt: &R, item: &str, floats: &[DType], all: &mut Vec<Tensor<R>>) -> Result<()> {
    let dtype =
        FLOATS.into_iter().find(|dtype| item.strip_prefix("matmul ").is_some_and(|name| name == dtype.to_string()));
    let Some(dtype) = dtype else { return Err(weftgrad::Error::argument("ladder", format!("no rung `{item}`"))) };
    if !floats.contains(&dtype) {
        return Ok(());
    }
    for (m, k, n) in [(64, 128, 96), (33, 77, 51), (1, 5, 3)] {
        let (a, b) = (data(rt, &[m, k], dtype, 20)?, data(rt, &[k, n], dtype, 21)?);
        let (at, bt) = (a.t()?.contiguous()?, b.t()?.contiguous()?);
        all.extend([a.matmul(&b)?, at.t()?.matmul(&b)?, a.matmul(&bt.t()?)?]);
        // A leading dimension larger than the row, one matrix for a batch, and a batch.
        let wide = data(rt, &[m, k + 9], dtype, 22)?;
        all.push(wide.narrow(1, 4, k)?.matmul(&b)?);
        let batch = data(rt, &[3, m, k], dtype, 23)?;
        all.extend([batch.matmul(&b)?, a.matmul(&data(rt, &[3, k, n], dtype, 24)?)?]);
    }
    Ok(())
}

/// Checks a second queue: each of two queues reads results of the other.
fn queue<R: Runtime>(rt: &R) -> Result<Found> {
    let other = rt.fork()?;
    let x = data(rt, &[100_003], DType::F32, 1)?;
    let mut failures = Vec::new();
    for round in 0..20 {
        // Doubled on the other queue: the values are exact.
        let y = x.mul(f64::from(round))?.to_device(&other)?.mul(2.0)?.to_device(rt)?;
        let due = x.mul(2.0 * f64::from(round))?.to_f64s()?;
        let wrong = y.to_f64s()?.iter().zip(&due).filter(|(y, due)| y != due).count();
        failures.extend((wrong > 0).then(|| format!("round {round}: {wrong} values differ")));
    }
    Ok(Found::checks(20, failures))
}

/// Allocates eight gigabytes in one piece and in 64, and reads the first and last element of each piece back.
pub(crate) fn large<R: Runtime>(rt: &R) -> Result<Found> {
    let mut failures = Vec::new();
    for (pieces, each) in [(1, 2usize << 30), (64, 32 << 20)] {
        let all = (0..pieces).map(|k| Tensor::full(rt, [each], DType::F32, f64::from(k)));
        for (k, x) in all.collect::<Result<Vec<_>>>()?.iter().enumerate() {
            let ends = [x.narrow(0, 0, 1)?.item()?, x.narrow(0, each - 1, 1)?.item()?];
            failures.extend((ends != [k as f64; 2]).then(|| format!("piece {k} of {each} floats ends with {ends:?}")));
        }
    }
    Ok(Found::checks(65, failures))
}

/// Checks that a request for more memory than there is fails, and that later work succeeds.
fn out_of_memory<R: Runtime>(rt: &R) -> Result<Found> {
    let refused = Tensor::zeros(rt, [1usize << 45], DType::F32);
    let mut failures = match refused {
        Ok(_) => vec!["128 TiB were given".to_string()],
        Err(_) => Vec::new(),
    };
    let x = Tensor::full(rt, [1000], DType::F32, 2.0)?.add(1.0)?.sum(&[0])?.item()?;
    failures.extend((x != 3000.0).then(|| format!("afterwards a sum is {x} for 3000")));
    Ok(Found::checks(2, failures).with("error", refused.err().map(|e| e.to_string())))
}
