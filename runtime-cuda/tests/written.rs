//! Every hand-written kernel, in every variant, on the emulated GPU: values and gradients are those of the CPU in `f64`.

#![cfg(feature = "emulate")]

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
};

use autograd::{Var, backward};
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::{ConvOptions, CrossEntropyOptions, FusedOp, Linear4bit, NestedScales, NnOps, Reduction},
    ops::{Apply, IndexOps, Op, PointwiseOps, ReduceOps, ScanOps, SortOps, ViewOps, cat},
    rng::Philox,
};
use runtime_cpu::Cpu;

use runtime_cuda::Cuda;

/// The table of variants that are compiled for every architecture.
const TABLE: &str = include_str!("../kernels/variants.txt");

/// A variant that needs more memory than a test has: keys of positions in more than 2³² elements.
const TOO_LARGE: [&str; 2] = ["scatter_add.cu", "K=u64"];

/// Named results of operations.
type Results<R> = Vec<(String, Vec<Tensor<R>>)>;

/// A runtime, the dtype of values, and that of computation.
struct Side<R> {
    rt: R,
    dtype: DType,
    computed: DType,
}

impl<R: Runtime> Side<R> {
    /// Values of `dtype` in the dtype of computation; `apart` puts them an element behind an aligned address.
    fn values(&self, shape: &[usize], seed: u64, apart: bool) -> Result<Tensor<R>> {
        let (low, high) = if self.dtype.is_float() { (-1.0, 1.0) } else { (0.0, 90.0) };
        let len: usize = shape.iter().product();
        let x = Tensor::uniform(&self.rt, [len], DType::F64, low, high, seed)?;
        let x = x.to_dtype(self.dtype)?.to_dtype(self.computed)?;
        let x = if apart { cat(&[&x.narrow(0, 0, 1)?, &x], 0)?.narrow(0, 1, len)? } else { x };
        x.reshape(shape)
    }

    fn leaf(&self, shape: &[usize], seed: u64, apart: bool) -> Result<Var<R>> {
        Var::leaf("x", self.values(shape, seed, apart)?)
    }

    fn indices(&self, shape: &[usize], size: usize) -> Result<Tensor<R>> {
        let (mut rng, count) = (Philox::new(17, 0), shape.iter().product());
        let indices = (0..count).map(|_| rng.below(size as u64) as i64).collect();
        Tensor::from_vec(&self.rt, indices)?.reshape(shape)
    }

    /// The value of `y`, and the gradients of `leaves` for a weighted sum of it.
    fn gradients(&self, y: &Var<R>, leaves: &[&Var<R>]) -> Result<Vec<Tensor<R>>> {
        let weights = self.values(&y.dims(), 99, false)?.to_dtype(y.dtype())?;
        let gradients = backward(&y.mul(&Var::new(weights))?.sum_all()?)?;
        let of = |leaf: &&Var<R>| gradients.of(leaf).cloned();
        Ok(std::iter::once(y.value()?).chain(leaves.iter().filter_map(of)).collect())
    }

    /// Operations of any dtype.
    fn of_elements(&self) -> Result<Results<R>> {
        let mut done = Vec::new();
        let mut put = |name: String, tensors: Vec<Tensor<R>>| done.push((name, tensors));
        // Rows that are moved in words of 1 to 16 bytes.
        for width in [1, 2, 3, 4, 16] {
            let index = self.indices(&[21, 1], 9)?.broadcast_to([21, width])?;
            put(format!("gather {width}"), vec![self.values(&[9, width], 1, false)?.gather(0, &index)?]);
        }
        if self.dtype == DType::Bool {
            return Ok(done);
        }
        let (base, source) = (self.values(&[9, 3], 2, false)?, self.values(&[300, 3], 3, false)?);
        let small = if self.dtype.is_float() {
            source
        } else {
            source.to_dtype(DType::F64)?.mul(0.02)?.to_dtype(self.computed)?
        };
        for rows in [20, 300] {
            let index = self.indices(&[rows, 1], 9)?.broadcast_to([rows, 3])?;
            put(format!("scatter_add {rows}"), vec![base.scatter_add(0, &index, &small.narrow(0, 0, rows)?)?]);
        }
        for size in [37, 700, 20_000] {
            let x = self.values(&[2, size], 4, false)?;
            put(format!("extremes {size}"), vec![x.argmax(-1)?, x.argmin(-1)?]);
            let (values, places) = x.sort(-1, size == 700)?;
            put(format!("sort {size}"), vec![values, places]);
            let x = if self.dtype == DType::U8 { x.clamp(0.0, 1.0)? } else { x };
            // Of signs, products have one rounding or none; of halves of them, recurrences neither vanish nor grow.
            let signs = x.sign()?;
            let mut scans = vec![x.cumsum(-1)?, signs.cumprod(-1)?];
            if self.dtype.is_float() {
                scans.push(x.linear_scan(&signs.mul(0.5)?, -1)?);
            }
            put(format!("scans {size}"), scans);
        }
        Ok(done)
    }

    /// Operations of floating-point numbers.
    fn of_floats(&self) -> Result<Results<R>> {
        let mut done = Vec::new();
        let mut put = |name: String, y: &Var<R>, leaves: &[&Var<R>]| -> Result<()> {
            done.push((name, self.gradients(y, leaves)?));
            Ok(())
        };
        let pack = 16 / self.dtype.size();
        // Rows of a warp and of a block, of whole packs and not.
        let held = (1..=8).map(|packs| 32 * pack * packs).filter(|width| *width <= 1024);
        let held = held.chain((1..=4).map(|packs| 256 * pack * packs).filter(|width| *width > 1024));
        for (width, apart) in
            held.map(|width| (width, false)).chain([(37, false), (37, true), (1031, false), (1031, true)])
        {
            let (x, w, b) =
                (self.leaf(&[6, width], 1, apart)?, self.leaf(&[width], 2, false)?, self.leaf(&[width], 3, false)?);
            put(format!("layer norm {width} {apart}"), &x.layer_norm(Some(&w), Some(&b), 1e-5)?, &[&x, &w, &b])?;
            put(format!("RMS norm {width} {apart}"), &x.rms_norm(Some(&w), 1e-5)?, &[&x, &w])?;
            if !width.is_multiple_of(2) {
                put(format!("norm without weights {width} {apart}"), &x.layer_norm(None, None, 1e-5)?, &[&x])?;
                put(format!("softmax {width} {apart}"), &x.mul(4.0)?.softmax(-1)?, &[&x])?;
                put(format!("softmax of a leaf {width} {apart}"), &x.softmax(-1)?, &[&x])?;
                put(format!("log-softmax {width} {apart}"), &x.log_softmax(-1)?, &[&x])?;
                for label_smoothing in [0.0, 0.1] {
                    let options = CrossEntropyOptions { label_smoothing, reduction: Reduction::None, ignore_index: 3 };
                    let target = Var::new(self.indices(&[6], width)?);
                    let name = format!("cross-entropy {width} {apart} {label_smoothing}");
                    put(name, &x.cross_entropy_with(&target, options)?, &[&x])?;
                }
            }
        }
        // Twice into the same gradient: the second gather adds.
        let (x, index) = (self.leaf(&[20, 3], 5, false)?, Var::new(self.indices(&[20, 3], 7)?));
        let zeros = Var::new(Tensor::zeros(&self.rt, [7, 3], self.computed)?);
        let twice = zeros.scatter_add(0, &index, &x)?.mul(&zeros.scatter_add(0, &index, &x)?.add(1.0)?)?;
        put("scatter-add, twice".into(), &twice, &[&x])?;
        for (groups, channels) in [(1, 6), (6, 6), (3, 3)] {
            let x = self.leaf(&[2, 6, 9, 8], 6, false)?;
            let w = self.leaf(&[12, channels / groups * 6 / channels, 3, 2], 7, false)?;
            let options = ConvOptions { stride: [2, 1], padding: [2, 0], dilation: [1, 2], groups };
            put(format!("convolution of {groups} groups"), &x.conv2d(&w, None, options)?, &[&x, &w])?;
        }
        for nested in [None, Some(NestedScales { block: 5, offset: 0.25 })] {
            let y = self.four_bits(nested)?;
            done.push((format!("four bits {nested:?}"), vec![y]));
        }
        done.extend(self.of_attention()?);
        Ok(done)
    }

    fn of_attention(&self) -> Result<Results<R>> {
        let mut done = Vec::new();
        for (head_dim, causal) in [32, 64, 80, 96, 128].into_iter().flat_map(|d| [(d, false), (d, true)]) {
            let (q, k) = (self.leaf(&[1, 2, 83, head_dim], 8, false)?, self.leaf(&[1, 1, 131, head_dim], 9, false)?);
            let v = self.leaf(&[1, 1, 131, head_dim], 10, false)?;
            let y = if causal { q.causal_attention(&k, &v)? } else { q.attention(&k, &v)? };
            done.push((format!("attention {head_dim} {causal}"), self.gradients(&y, &[&q, &k, &v])?));
        }
        Ok(done)
    }

    /// A product with a matrix of four-bit elements, in blocks that divide neither its rows nor its size.
    fn four_bits(&self, nested: Option<NestedScales>) -> Result<Tensor<R>> {
        let (shape, block) = ([7usize, 33], 32);
        let (elements, mut rng) = (shape[0] * shape[1], Philox::new(22, 1));
        let mut bytes = |n: usize| Tensor::from_vec(&self.rt, (0..n).map(|_| rng.below(256) as u8).collect());
        let floats = |n: usize, seed: u64| Tensor::uniform(&self.rt, [n], DType::F32, -1.0, 1.0, seed);
        let scales = elements.div_ceil(block);
        let mut ins = vec![self.values(&[5, shape[1]], 11, false)?, bytes(elements.div_ceil(2))?, floats(16, 12)?];
        match nested {
            None => ins.push(floats(scales, 13)?),
            Some(nested) => {
                ins.extend([bytes(scales)?, floats(scales.div_ceil(nested.block), 14)?, floats(256, 15)?]);
            }
        }
        let op = Op::Fused(FusedOp::Linear4bit(Linear4bit { shape, block, nested, transposed: false }));
        Ok(Tensor::apply(op, &ins.iter().collect::<Vec<_>>())?.swap_remove(0))
    }
}

/// The largest difference, in units of the largest value of each result, from that on the CPU.
fn compare(side: &Side<Cuda>) -> Result<Vec<(String, f64)>> {
    let dtype = side.dtype;
    let computed = if dtype.is_float() { DType::F64 } else { dtype };
    let cpu = Side { rt: Cpu::with_threads(1), dtype, computed };
    let (mut got, mut want) = (side.of_elements()?, cpu.of_elements()?);
    if dtype.is_float() {
        got.extend(side.of_floats()?);
        want.extend(cpu.of_floats()?);
    }
    if dtype.is_half() {
        let grouped = Side { rt: side.rt.clone().with_warpgroups(true), ..*side };
        got.extend(grouped.of_attention()?);
        want.extend(cpu.of_attention()?);
    }
    assert_eq!(got.len(), want.len());
    let mut differences = Vec::new();
    for ((name, got), (_, want)) in got.into_iter().zip(want) {
        assert_eq!(got.len(), want.len(), "{name}");
        for (k, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.dims(), want.dims(), "{name}");
            let (got, want) = (got.to_f64s()?, want.to_f64s()?);
            let largest = want.iter().fold(f64::MIN_POSITIVE, |most, x| most.max(x.abs()));
            let apart = |(a, b): (&f64, &f64)| if a.is_nan() { f64::INFINITY } else { (a - b).abs() / largest };
            differences.push((format!("{name}, result {k}"), got.iter().zip(&want).map(apart).fold(0.0, f64::max)));
        }
    }
    Ok(differences)
}

/// The words of a kernel's description, but its entry function.
type Variant = BTreeSet<String>;

/// The variants of the table: for each line, all combinations of its defines' values.
fn variants() -> BTreeSet<Variant> {
    let lines = TABLE.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let of_line = |line: &str| -> Vec<Variant> {
        line.split_whitespace().fold(vec![Variant::new()], |all, word| {
            let (define, values) = word.split_once('=').map_or((String::new(), word), |(n, v)| (format!("{n}="), v));
            let with =
                |value: &str| all.iter().map(|v| v | &Variant::from([format!("{define}{value}")])).collect::<Vec<_>>();
            values.split(',').flat_map(with).collect()
        })
    };
    let too_large = Variant::from(TOO_LARGE.map(String::from));
    lines.flat_map(of_line).filter(|variant| !too_large.is_subset(variant)).collect()
}

/// The entry functions of all files, after the files' names.
fn entries() -> BTreeSet<String> {
    let of_declaration = |mut rest: &str| -> Option<String> {
        loop {
            let (before, after) = rest.split_once('(')?;
            match before.rsplit(|c: char| !c.is_alphanumeric() && c != '_').next()? {
                "__launch_bounds__" | "sizeof" => rest = after,
                name => return Some(name.into()),
            }
        }
    };
    let files = variants().into_iter().flatten().filter(|word| word.ends_with(".cu")).collect::<BTreeSet<_>>();
    let of_file = |file: &String| -> Vec<String> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join(file);
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let names = text.split("KERNEL void").skip(1).filter_map(of_declaration);
        names.map(|name| format!("{file} {name}")).collect()
    };
    files.iter().flat_map(of_file).collect()
}

#[test]
fn every_variant_has_the_values_of_the_cpu() -> Result<()> {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let floats = [(DType::F64, -48), (DType::F32, -20), (DType::F16, -10), (DType::BF16, -7)];
    let others = [DType::I64, DType::I32, DType::U32, DType::U8, DType::Bool].map(|dtype| (dtype, -60));
    let all = || floats.into_iter().chain(others);
    let work = |rt: &Cuda, dtype| compare(&Side { rt: rt.clone(), dtype, computed: dtype });
    emulated_gpu::compile_for(&folder, |listing| all().for_each(|(dtype, _)| drop(work(listing, dtype))))?;
    // A GPU does one piece of work at a time: each thread has its own.
    let next = Mutex::new(all());
    let some = || -> Result<(Vec<String>, Vec<String>)> {
        let ((cuda, _), mut wrong) = (emulated_gpu::watched(&folder)?, Vec::new());
        let take = || next.lock().expect("no panic").next();
        while let Some((dtype, unit)) = take() {
            let differences = work(&cuda, dtype)?.into_iter().filter(|(_, difference)| *difference > 2f64.powi(unit));
            wrong.extend(differences.map(|(name, difference)| format!("{dtype} {name}: {difference:e}")));
        }
        Ok((wrong, cuda.loaded_kernels()))
    };
    let threads = thread::available_parallelism().map_or(1, |n| n.get());
    let done = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>>>()
    })?;
    let (wrong, loaded): (Vec<_>, Vec<_>) = done.into_iter().unzip();
    let (wrong, loaded) = (wrong.concat(), loaded.concat());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));

    let without_entry =
        |kernel: &String| kernel.split(' ').enumerate().filter(|(at, _)| *at != 1).map(|(_, w)| w.into()).collect();
    let reached: BTreeSet<Variant> = loaded.iter().map(without_entry).collect();
    let missing: Vec<_> = variants().difference(&reached).cloned().collect();
    assert!(missing.is_empty(), "{} variants were not launched: {missing:?}", missing.len());
    let launched: BTreeSet<String> =
        loaded.iter().map(|kernel| kernel.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect();
    let missing: Vec<_> = entries().difference(&launched).cloned().collect();
    assert!(missing.is_empty(), "functions that were not launched: {missing:?}");
    Ok(())
}
