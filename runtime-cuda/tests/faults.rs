//! Faults in the texts of kernels, each of which the emulated GPU names: a barrier that is missing, a lane that is left
//! out, a row of a fragment, a pitch.
#![cfg(feature = "emulate")]

use std::{path::PathBuf, sync::LazyLock, thread};

use autograd::{Var, backward};
use numcore::{
    DType, Result, Runtime, Tensor,
    fused::NnOps,
    ops::{IndexOps, PointwiseOps, ReduceOps, ScanOps, SortOps},
};
use runtime_cpu::Cpu;
use runtime_cuda::Cuda;

static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated"));

/// Work that launches the kernels in question.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Work {
    Attention,
    /// By products of warpgroups.
    GroupedAttention,
    CausalAttention,
    Norm,
    WideSoftmax,
    CrossEntropy,
    ShortSort,
    LongSort,
    Scan,
    Gather,
    Argmax,
}
use Work::*;

const ALL: [Work; 11] = [
    Attention,
    GroupedAttention,
    CausalAttention,
    Norm,
    WideSoftmax,
    CrossEntropy,
    ShortSort,
    LongSort,
    Scan,
    Gather,
    Argmax,
];

impl Work {
    /// The values of the work on a runtime.
    fn run<R: Runtime>(self, rt: &R) -> Result<Vec<f64>> {
        let uniform = |shape: &[usize], dtype: DType, seed: u64| {
            Tensor::uniform(rt, shape, DType::F32, -1.0, 1.0, seed)?.to_dtype(dtype)
        };
        let heads = |rows: usize, seed: u64| uniform(&[1, 2, rows, 64], DType::BF16, seed);
        let indices = |n: usize, size: i64| (0..n as i64).map(|i| (i * 7 + 3) % size).collect::<Vec<_>>();
        match self {
            Attention | GroupedAttention => heads(70, 1)?.attention(&heads(85, 2)?, &heads(85, 3)?)?.to_f64s(),
            CausalAttention => heads(150, 1)?.causal_attention(&heads(150, 2)?, &heads(150, 3)?)?.to_f64s(),
            Norm => {
                let (w, b) = (uniform(&[2048], DType::F32, 2)?, uniform(&[2048], DType::F32, 3)?);
                uniform(&[5, 2048], DType::F32, 1)?.layer_norm(Some(&w), Some(&b), 1e-5)?.to_f64s()
            }
            WideSoftmax => uniform(&[3, 3000], DType::F32, 1)?.softmax(-1)?.to_f64s(),
            CrossEntropy => {
                let target = Tensor::from_slice(rt, [6], &indices(6, 1100))?;
                uniform(&[6, 1100], DType::F32, 1)?.cross_entropy(&target)?.to_f64s()
            }
            ShortSort => uniform(&[2, 300], DType::F32, 1)?.sort(-1, false)?.0.to_f64s(),
            LongSort => uniform(&[5000], DType::F32, 1)?.sort(-1, true)?.0.to_f64s(),
            Scan => uniform(&[2, 3000], DType::F32, 1)?.cumsum(-1)?.to_f64s(),
            Gather => {
                let index = Tensor::from_slice(rt, [20, 40], &indices(800, 9))?;
                uniform(&[9, 40], DType::F32, 1)?.gather(0, &index)?.to_f64s()
            }
            Argmax => uniform(&[3, 700], DType::F32, 1)?.argmax(-1)?.to_dtype(DType::F32)?.to_f64s(),
        }
    }
}

fn on(work: Work, cuda: &Cuda) -> Cuda {
    cuda.clone().with_warpgroups(work == GroupedAttention)
}

/// The largest difference from the CPU's values.
fn error(work: Work, values: &[f64]) -> f64 {
    let want = work.run(&Cpu::with_threads(1)).unwrap_or_else(|e| panic!("{work:?}: {e}"));
    assert_eq!(values.len(), want.len(), "{work:?}");
    let differences = values.iter().zip(&want).map(|(a, b)| if a.is_nan() { f64::INFINITY } else { (a - b).abs() });
    differences.fold(0.0, f64::max)
}

const TOLERANCE: f64 = 0.02;

/// A fault: work that meets it, a text of its kernels, the text in its place, and words of the finding. Without words
/// the values are wrong.
type Row = (Work, &'static str, &'static str, &'static str);

const NOTHING: &str = "";
/// A race, or, where the writer is a later warp, a read of what nobody has written.
const SHARED: &str = "shared memory at";
const GLOBAL: &str = "a race in global memory";

#[rustfmt::skip]
const FAULTS: &[Row] = &[
    // Barriers that are missing.
    (Attention, "products_see_writes();\n        __syncthreads();", "products_see_writes();", SHARED),
    (WideSoftmax, "= x;\n        __syncthreads();", "= x;", SHARED),
    (Norm, "parts[1][threadIdx.x / WARP] = b;\n        __syncthreads();", "parts[1][threadIdx.x / WARP] = b;", SHARED),
    (ShortSort, "reach /= 2) {\n            __syncthreads();", "reach /= 2) {", SHARED),
    (LongSort, "sum += table[d][part * 16 + t];\n    __syncthreads();", "sum += table[d][part * 16 + t];", SHARED),
    (LongSort, "- table[d][0];\n    }\n    __syncthreads();", "- table[d][0];\n    }", SHARED),
    (Scan, "parts[warp] = upto;\n    __syncthreads();", "parts[warp] = upto;", SHARED),
    (Argmax, "\n    __syncthreads();", "\n", SHARED),
    // Copies that are used before they have arrived.
    (CausalAttention, "copy_async_wait();\n        if (TOGETHER)", "if (TOGETHER)", "an asynchronous copy by thread"),
    // Threads and lanes that are absent.
    (Attention, "__shfl_xor_sync(ALL_LANES, largest, 1)", "__shfl_xor_sync(0x7fffffffu, largest, 1)", "`shfl.sync` needs lanes"),
    (Attention, "        __syncthreads();", "        if (threadIdx.x != 5) __syncthreads();", "`bar.sync` needs lanes"),
    (WideSoftmax, "if (row >= rows) return;", "if (row >= rows || threadIdx.x >= 224) return;", "have ended"),
    // Memory that nobody has written.
    (LongSort, "for (int d = 0; d < DIGITS; d++) counts", "for (int d = 1; d < DIGITS; d++) counts", "has not written"),
    (Attention, "first, sizes.queries);\n\n    int visible", "first + 64, sizes.queries);\n    q_tile += 16 * KEYS * TILE_ROW;\n    int visible", "of shared memory"),
    // Pitches, alignment and bounds.
    (Attention, "TOGETHER ? 0 : 16 / (int)sizeof(T)", "TOGETHER ? 0 : 8 / (int)sizeof(T)", "is not aligned"),
    (Attention, "if (row < count) store_pack", "store_pack", GLOBAL),
    (Gather, "row * step];", "row * step * 100000];", "outside of global memory"),
    (Gather, "if (row < 0 || row >= size)", "if (row >= 0)", "an index is out of range"),
    // Results that two threads, or two blocks, write.
    (Attention, "if (lane_column() == 0 && query < sizes.queries)", "if (query < sizes.queries)", GLOBAL),
    (Gather, "i64 i = global_thread(); i < count;", "i64 i = global_thread() / 2; i < count;", GLOBAL),
    // Parameters that differ from the arguments, and launches that the kernel does not take.
    (WideSoftmax, "i64 rows, i64 width) {", "i64 rows, int width) {", "argument 3 has 8 bytes, and the parameter 4"),
    (Attention, "__launch_bounds__(THREADS, RESIDENT)", "__launch_bounds__(64)", "128 threads in a block, and the kernel takes at most 64"),
    // Wrong values: a fragment's row, swapped operands, a lane, a diagonal, a sign.
    (Attention, "a += (warp_row() + lane % 16) * TILE_ROW", "a += (warp_row() + lane % 8) * TILE_ROW", NOTHING),
    (Attention, "mma_m16n8k16(c[n], left, right[0], right[1], E());", "mma_m16n8k16(c[n], left, right[1], right[0], E());", NOTHING),
    // Products of a warpgroup: what is handed over and waited for, and where tiles are.
    (GroupedAttention, "if (TOGETHER) products_see_writes();", "", "without `fence.proxy.async`"),
    (GroupedAttention, "wgmma.fence.sync.aligned;", "", "without `wgmma.fence`"),
    (GroupedAttention, "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 2;", "products of `wgmma` under way"),
    (GroupedAttention, "memory + (1024 - shared_address(memory) % 1024) % 1024", "memory + 128", NOTHING),
    (GroupedAttention, "(column / 8 % 8 ^ row % 8) * 8", "(column / 8 % 8) * 8", NOTHING),
    (GroupedAttention, "int panel = k / 4, column = k % 4 * 16;", "int panel = k / 4, column = k % 4 * 8;", NOTHING),
    (GroupedAttention, "(panel * 8 * K + k * 16) * 64", "(panel * 8 * K + k * 8) * 64", NOTHING),
    (GroupedAttention, "sum += __shfl_xor_sync(ALL_LANES, sum, 2);", "sum += __shfl_xor_sync(ALL_LANES, sum, 1);", NOTHING),
    (CausalAttention, "(TURNED ? r > c : c > r) s[n][e]", "(TURNED ? r > c : c > r + 1) s[n][e]", NOTHING),
];

#[test]
fn the_work_itself_is_right() {
    let cuda = emulated_gpu::open(&*FOLDER).unwrap_or_else(|e| panic!("{e}"));
    for work in ALL {
        let values = work.run(&on(work, &cuda)).unwrap_or_else(|e| panic!("{work:?}: {e}"));
        assert!(error(work, &values) < TOLERANCE, "{work:?}: {}", error(work, &values));
    }
}

/// The reason why a fault counts as not found, if it does.
fn unnoticed(&(work, from, to, words): &Row) -> Option<String> {
    let (cuda, altered) = emulated_gpu::altered(&*FOLDER, from, to).unwrap_or_else(|e| panic!("{e}"));
    let done = work.run(&on(work, &cuda));
    let why = match done {
        _ if altered() == 0 => "no kernel has the text".into(),
        Ok(values) if words.is_empty() && error(work, &values) > TOLERANCE => return None,
        Ok(values) => format!("nothing is found, and the values differ by {}", error(work, &values)),
        Err(found) if !words.is_empty() && found.to_string().contains(words) => return None,
        Err(found) => found.to_string(),
    };
    Some(format!("{work:?}, {from:?} -> {to:?}: {why}"))
}

/// A text of the file with the three kernels of attention's gradients, in place of itself: its modules are counted.
#[test]
fn kernels_of_one_text_are_one_module_by_whichever_thread() -> Result<()> {
    let text = "attention_grad_keys(";
    let (cuda, modules) = emulated_gpu::altered(&*FOLDER, text, text)?;
    let gradients = || -> Result<Vec<f64>> {
        let x = Tensor::uniform(&cuda, [1, 1, 40, 64], DType::F32, -1.0, 1.0, 1)?.to_dtype(DType::BF16)?;
        let x = Var::leaf("x", x)?;
        let gradients = backward(&x.attention(&x, &x)?.square()?.sum_all()?)?;
        gradients.of(&x).expect("a gradient").to_f64s()
    };
    let both: Vec<Vec<f64>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(gradients)).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<_>>()
    })?;
    assert!(both[0] == both[1] && both[0].iter().any(|x| *x != 0.0));
    let kernels = cuda.loaded_kernels();
    let of_file = kernels.iter().filter(|kernel| kernel.starts_with("attention_grad.cu")).count();
    assert_eq!((of_file, modules()), (3, 1), "{kernels:?}");
    Ok(())
}

#[test]
fn each_fault_is_found() {
    let of = |rows: &[Row]| rows.iter().filter_map(unnoticed).collect::<Vec<String>>();
    let each = FAULTS.len().div_ceil(thread::available_parallelism().map_or(1, |n| n.get()));
    let unnoticed: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> = FAULTS.chunks(each).map(|rows| scope.spawn(move || of(rows))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(unnoticed.is_empty(), "{} of {}:\n{}", unnoticed.len(), FAULTS.len(), unnoticed.join("\n"));
}
