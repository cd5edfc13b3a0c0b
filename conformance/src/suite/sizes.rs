//! Families with their own kernels against plain loops on the host: sizes that are odd, long, wide, and partitioned
//! among threads.

use numcore::{
    DType, Result, Runtime, Tensor,
    ops::{IndexOps, MatmulOps, PointwiseOps, ReduceOps, ScanOps, SortOps, ViewOps},
    rng::Philox,
};

use super::{
    close::near,
    report::{Section, Verdict},
};
use crate::golden::Placement;

pub(crate) fn sizes<R: Runtime>(rt: &R) -> Section {
    let mut section = Section::new("sizes");
    let shapes: [&[usize]; 9] =
        [&[1], &[31], &[100_003], &[3, 5, 7], &[257, 129], &[2, 70_000], &[70_000, 2], &[1, 1, 1], &[17, 1, 33, 2]];
    for shape in shapes {
        for placement in Placement::ALL {
            section.check(format!("pointwise {shape:?} {placement:?}"), || pointwise(rt, shape, placement));
            section.check(format!("reduce {shape:?} {placement:?}"), || reduce(rt, shape, placement));
            section.check(format!("scan {shape:?} {placement:?}"), || scan(rt, shape, placement));
            section.check(format!("sort {shape:?} {placement:?}"), || sort(rt, shape, placement));
            section.check(format!("index {shape:?} {placement:?}"), || index(rt, shape, placement));
        }
    }
    matmuls(rt, &mut section);
    section
}

/// Values of an array by position, with the walk along an axis that reductions need.
struct Host {
    dims: Vec<usize>,
    values: Vec<f64>,
}

impl Host {
    /// Multiples of 1/8 of a moderate size: sums of them are exact in `f32`, so order does not matter.
    fn new(dims: &[usize], seed: u64) -> Host {
        let mut rng = Philox::new(seed, 2);
        let values = (0..dims.iter().product()).map(|_| rng.below(33) as f64 / 8.0 - 2.0).collect();
        Host { dims: dims.to_vec(), values }
    }

    fn on<R: Runtime>(&self, rt: &R, placement: Placement) -> Result<Tensor<R>> {
        let narrow: Vec<f32> = self.values.iter().map(|&v| v as f32).collect();
        placement.of(&Tensor::from_slice(rt, &self.dims[..], &narrow).and_then(|t| t.to_dtype(DType::F32))?)
    }

    /// `(outer, length, inner)` around an axis.
    fn around(&self, axis: usize) -> (usize, usize, usize) {
        (self.dims[..axis].iter().product(), self.dims[axis], self.dims[axis + 1..].iter().product())
    }

    /// Applies `f` to each row along an axis.
    fn lines(&self, axis: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
        let (outer, len, inner) = self.around(axis);
        let results: Vec<Vec<f64>> = (0..outer * inner)
            .map(|k| f(&(0..len).map(|i| self.values[(k / inner * len + i) * inner + k % inner]).collect::<Vec<_>>()))
            .collect();
        let n = results.first().map_or(0, Vec::len);
        (0..outer * n * inner).map(|at| results[at / (n * inner) * inner + at % inner][at / inner % n]).collect()
    }
}

fn pointwise<R: Runtime>(rt: &R, shape: &[usize], placement: Placement) -> Result<Verdict> {
    let (a, b) = (Host::new(shape, 1), Host::new(shape, 2));
    let got = a.on(rt, placement)?.mul(&b.on(rt, Placement::Dense)?)?.add(1.0)?.to_f64s()?;
    let want: Vec<f64> = a.values.iter().zip(&b.values).map(|(a, b)| a * b + 1.0).collect();
    Ok(near("a · b + 1", &got, &want, 0.0))
}

fn reduce<R: Runtime>(rt: &R, shape: &[usize], placement: Placement) -> Result<Verdict> {
    let host = Host::new(shape, 3);
    let x = host.on(rt, placement)?;
    let all: f64 = host.values.iter().sum();
    let mut verdict = near("the sum of all", &x.sum_all()?.to_f64s()?, &[all], 0.0);
    for axis in 0..shape.len() {
        let a = axis as isize;
        let sum = host.lines(axis, |l| vec![l.iter().sum()]);
        let max = host.lines(axis, |l| vec![l.iter().copied().fold(f64::NEG_INFINITY, f64::max)]);
        let first = |l: &[f64]| (1..l.len()).fold(0, |m, i| if l[i] > l[m] { i } else { m }) as f64;
        let at = host.lines(axis, |l| vec![first(l)]);
        verdict = verdict
            .and(near(&format!("the sum over {axis}"), &x.sum(&[a])?.to_f64s()?, &sum, 0.0))
            .and(near(&format!("the largest along {axis}"), &x.amax_keepdim(&[a])?.to_f64s()?, &max, 0.0))
            .and(near(&format!("its position along {axis}"), &x.argmax(a)?.to_f64s()?, &at, 0.0));
    }
    if shape.len() > 2 {
        // All axes but one, which is in the middle.
        let others: Vec<isize> = (0..shape.len() as isize).filter(|&a| a != 1).collect();
        let mut sums = vec![0.0; shape[1]];
        let inner: usize = shape[2..].iter().product();
        host.values.iter().enumerate().for_each(|(i, v)| sums[i / inner % shape[1]] += v);
        verdict = verdict.and(near("the sum over all but 1", &x.sum(&others)?.to_f64s()?, &sums, 0.0));
    }
    Ok(verdict)
}

fn scan<R: Runtime>(rt: &R, shape: &[usize], placement: Placement) -> Result<Verdict> {
    let host = Host::new(shape, 4);
    let x = host.on(rt, placement)?;
    let running = |l: &[f64]| {
        let mut sum = 0.0;
        l.iter()
            .map(|v| {
                sum += v;
                sum
            })
            .collect()
    };
    let along = |axis: usize| {
        let got = x.cumsum(axis as isize)?.to_f64s()?;
        Ok(near(&format!("the running sum along {axis}"), &got, &host.lines(axis, running), 0.0))
    };
    Verdict::all((0..shape.len()).map(along))
}

fn sort<R: Runtime>(rt: &R, shape: &[usize], placement: Placement) -> Result<Verdict> {
    let host = Host::new(shape, 5);
    let x = host.on(rt, placement)?;
    let mut verdict = Verdict::PASSED;
    for axis in 0..shape.len() {
        for descending in [false, true] {
            let order = |l: &[f64]| {
                let mut order: Vec<usize> = (0..l.len()).collect();
                order.sort_by(|&a, &b| if descending { l[b].total_cmp(&l[a]) } else { l[a].total_cmp(&l[b]) });
                order
            };
            let (values, index) = x.sort(axis as isize, descending)?;
            let sorted = host.lines(axis, |l| order(l).iter().map(|&i| l[i]).collect());
            let places = host.lines(axis, |l| order(l).iter().map(|&i| i as f64).collect());
            verdict = verdict.and(near(&format!("values along {axis}"), &values.to_f64s()?, &sorted, 0.0)).and(near(
                &format!("positions along {axis}"),
                &index.to_f64s()?,
                &places,
                0.0,
            ));
        }
    }
    Ok(verdict)
}

fn index<R: Runtime>(rt: &R, shape: &[usize], placement: Placement) -> Result<Verdict> {
    let host = Host::new(shape, 6);
    let x = host.on(rt, placement)?;
    let mut verdict = Verdict::PASSED;
    for (axis, &n) in shape.iter().enumerate() {
        let ids: Vec<i64> = (0..n + 3).map(|i| (i * 7 % n) as i64).collect();
        let ids_on = Tensor::from_slice(rt, [ids.len()], &ids)?;
        let picked = host.lines(axis, |l| ids.iter().map(|&i| l[i as usize]).collect());
        let taken = x.index_select(axis as isize, &ids_on)?;
        verdict = verdict.and(near(&format!("rows picked along {axis}"), &taken.to_f64s()?, &picked, 0.0));
        let added = host.lines(axis, |l| {
            let mut sums = l.to_vec();
            ids.iter().for_each(|&i| sums[i as usize] += l[i as usize]);
            sums
        });
        let got = x.index_add(axis as isize, &ids_on, &taken)?.to_f64s()?;
        verdict = verdict.and(near(&format!("rows added along {axis}"), &got, &added, 0.0));
    }
    Ok(verdict)
}

fn matmuls<R: Runtime>(rt: &R, section: &mut Section) {
    let sizes = [
        [1, 1, 1],
        [1, 7, 1],
        [3, 1, 5],
        [1, 64, 33],
        [65, 129, 33],
        [127, 31, 257],
        [512, 3, 2],
        [2, 5000, 3],
        [16, 16, 16],
        [33, 0, 5],
        [0, 4, 3],
        [1, 300, 1000],
        [1000, 300, 1],
    ];
    for [m, k, n] in sizes {
        for placement in Placement::ALL {
            for batch in [1, 3] {
                let what = format!("matmul {batch} × [{m}, {k}] · [{k}, {n}] {placement:?}");
                section.check(what, || matmul(rt, [batch, m, k, n], placement));
            }
        }
    }
    // More matrices than a dimension of a GPU's grid has, and batches that go backwards.
    section.check("matmul 70000 × [2, 3] · [3, 2]", || matmul(rt, [70_000, 2, 3, 2], Placement::Dense));
    section.check("matmul 5 × [2, 3] · [3, 2], batches backwards", || backwards(rt));
}

/// Checks products of operands flipped along the batch: either operand, both.
fn backwards<R: Runtime>(rt: &R) -> Result<Verdict> {
    let (a, b) = (Host::new(&[5, 2, 3], 7), Host::new(&[5, 3, 2], 8));
    let (left, right) = (a.on(rt, Placement::Dense)?, b.on(rt, Placement::Dense)?);
    let mut verdict = Verdict::PASSED;
    for flipped in [[true, false], [false, true], [true, true]] {
        let turned = |x: &Tensor<R>, on: bool| if on { x.flip(&[0]) } else { Ok(x.clone()) };
        let got = turned(&left, flipped[0])?.matmul(&turned(&right, flipped[1])?)?.to_f64s()?;
        let of = |at: usize, on: bool| if on { 4 - at } else { at };
        let cell = |at: usize| {
            let (s, i, j) = (at / 4, at / 2 % 2, at % 2);
            let (s, t) = (of(s, flipped[0]), of(s, flipped[1]));
            (0..3).map(|l| a.values[(s * 2 + i) * 3 + l] * b.values[(t * 3 + l) * 2 + j]).sum()
        };
        let want: Vec<f64> = (0..20).map(cell).collect();
        verdict = verdict.and(near(&format!("flipped {flipped:?}"), &got, &want, 0.0));
    }
    Ok(verdict)
}

fn matmul<R: Runtime>(rt: &R, [batch, m, k, n]: [usize; 4], placement: Placement) -> Result<Verdict> {
    let (a, b) = (Host::new(&[batch, m, k], 7), Host::new(&[batch, k, n], 8));
    let got = a.on(rt, placement)?.matmul(&b.on(rt, placement)?)?;
    let cell = |at: usize| {
        let (s, i, j) = (at / (m * n), at / n % m, at % n);
        (0..k).map(|l| a.values[(s * m + i) * k + l] * b.values[(s * k + l) * n + j]).sum()
    };
    let want: Vec<f64> = (0..batch * m * n).map(cell).collect();
    // Products of eighths, summed: exact in f32 as long as sums stay below 2^18.
    let shared = a.on(rt, placement)?.matmul(&b.on(rt, placement)?.narrow(0, 0, 1)?)?;
    let first = near("one matrix shared by all", &shared.narrow(0, 0, 1)?.to_f64s()?, &want[..m * n], 0.0);
    Ok(near("the product", &got.to_f64s()?, &want, 0.0).and(first))
}
