//! Collectives that gradients flow through, against their formulas.

use distributed::differentiable::{
    all_gather, all_reduce, all_to_all, all_to_all_parts, copy, gather, reduce_scatter, split,
};

use crate::prelude::*;

const WORLDS: [usize; 5] = [1, 2, 3, 5, 8];

/// Values that differ in every place and on every rank.
fn values(rank: usize, count: usize) -> Vec<f64> {
    (0..count).map(|i| ((i * 7 + rank * 13) % 11) as f64 - 4.0 + rank as f64 / 8.0).collect()
}

fn tensor(comm: &Comm<Cpu>, rank: usize, dims: &[usize]) -> Tensor<Cpu> {
    Tensor::from_slice(comm.runtime(), dims, &values(rank, dims.iter().product())).unwrap()
}

/// What an exchange gives on every rank, and the gradient of its input where the output's is `weights`.
type Exchanged = (Vec<f64>, Vec<f64>);

fn run(
    n: usize,
    dims: &[usize],
    exchange: impl Fn(&Comm<Cpu>, &Var<Cpu>) -> Result<Var<Cpu>> + Sync,
) -> Vec<Exchanged> {
    let program = |comm: Comm<Cpu>| {
        let x = Var::leaf("x", tensor(&comm, comm.rank(), dims))?;
        let y = exchange(&comm, &x)?;
        let weights = Var::new(tensor(&comm, comm.rank() + 20, &y.dims()));
        let gradients = backward(&y.mul(&weights)?.sum_all()?)?;
        let leaf = x.as_leaf().unwrap();
        Ok((y.value()?.to_vec::<f64>()?, gradients.get(leaf).unwrap().to_vec::<f64>()?))
    };
    Ranks::new(n).run(cpu, program).unwrap_or_else(|error| panic!("{n} ranks: {error}"))
}

fn sum_of(ranks: impl Iterator<Item = usize>, count: usize) -> Vec<f64> {
    ranks.fold(vec![0.0; count], |sum, rank| sum.iter().zip(values(rank, count)).map(|(a, b)| a + b).collect())
}

/// Part `k` of `n` along the second dimension of `[2, width]`.
fn columns(all: &[f64], n: usize, k: usize) -> Vec<f64> {
    let width = all.len() / 2;
    all.chunks(width).flat_map(|row| row[k * width / n..(k + 1) * width / n].to_vec()).collect()
}

#[test]
fn copy_and_all_reduce_are_each_others_gradients() {
    for n in WORLDS {
        for (rank, (y, dx)) in run(n, &[2, 3], copy).into_iter().enumerate() {
            assert_eq!(y, values(rank, 6));
            assert_eq!(dx, sum_of(20..20 + n, 6));
        }
        for (rank, (y, dx)) in run(n, &[2, 3], all_reduce).into_iter().enumerate() {
            assert_eq!(y, sum_of(0..n, 6));
            assert_eq!(dx, values(rank + 20, 6));
        }
    }
}

#[test]
fn split_and_gather_are_each_others_gradients_along_any_dimension() {
    for n in WORLDS {
        for (rank, (y, dx)) in run(n, &[2, 2 * n], |c, x| split(c, x, 1)).into_iter().enumerate() {
            assert_eq!(y, columns(&values(rank, 4 * n), n, rank));
            let expected = run_gathered(n, 20);
            assert_eq!(dx, expected, "{n} ranks");
        }
        for (rank, (y, dx)) in run(n, &[2, 2], |c, x| gather(c, x, 1)).into_iter().enumerate() {
            assert_eq!(y, run_gathered(n, 0));
            assert_eq!(dx, columns(&values(rank + 20, 4 * n), n, rank));
        }
        for (rank, (y, dx)) in run(n, &[1, 4], |c, x| gather(c, x, 0)).into_iter().enumerate() {
            assert_eq!(y, (0..n).flat_map(|r| values(r, 4)).collect::<Vec<_>>());
            assert_eq!(dx, values(rank + 20, 4 * n)[4 * rank..4 * rank + 4]);
        }
    }
}

/// `[2, 2]` of every rank, side by side.
fn run_gathered(n: usize, first: usize) -> Vec<f64> {
    (0..2).flat_map(|row| (0..n).flat_map(move |r| values(first + r, 4)[2 * row..2 * row + 2].to_vec())).collect()
}

#[test]
fn all_gather_and_reduce_scatter_are_each_others_gradients() {
    for n in WORLDS {
        for (rank, (y, dx)) in run(n, &[2, 2], |c, x| all_gather(c, x, 1)).into_iter().enumerate() {
            assert_eq!(y, run_gathered(n, 0));
            assert_eq!(dx, columns(&sum_of(20..20 + n, 4 * n), n, rank));
        }
        for (rank, (y, dx)) in run(n, &[2, 2 * n], |c, x| reduce_scatter(c, x, 1)).into_iter().enumerate() {
            assert_eq!(y, columns(&sum_of(0..n, 4 * n), n, rank));
            assert_eq!(dx, run_gathered(n, 20));
        }
    }
}

#[test]
fn all_to_all_goes_back_the_way_it_came() {
    for n in WORLDS {
        for (rank, (y, dx)) in run(n, &[2 * n, 3], all_to_all).into_iter().enumerate() {
            assert_eq!(y, (0..n).flat_map(|r| values(r, 6 * n)[6 * rank..6 * rank + 6].to_vec()).collect::<Vec<_>>());
            assert_eq!(
                dx,
                (0..n).flat_map(|r| values(r + 20, 6 * n)[6 * rank..6 * rank + 6].to_vec()).collect::<Vec<_>>()
            );
        }
        // Rank i sends rank j (i + 2j) % 3 rows: some send nothing to each other.
        let rows = |i: usize, j: usize| (i + 2 * j) % 3;
        let outcomes = Ranks::new(n).run(cpu, |comm: Comm<Cpu>| {
            let me = comm.rank();
            let (send, recv): (Vec<_>, Vec<_>) = (0..n).map(|r| (rows(me, r), rows(r, me))).unzip();
            let x = Var::leaf("x", tensor(&comm, me, &[send.iter().sum(), 2]))?;
            let y = all_to_all_parts(&comm, &x, &send, &recv)?;
            let again = all_to_all_parts(&comm, &y, &recv, &send)?;
            Ok((x.value()?.to_vec::<f64>()?, y.dims()[0], again.value()?.to_vec::<f64>()?))
        });
        for (rank, (x, received, again)) in outcomes.unwrap().into_iter().enumerate() {
            assert_eq!(received, (0..n).map(|r| rows(r, rank)).sum::<usize>());
            assert_eq!(x, again);
        }
    }
}

#[test]
fn gradients_have_gradients() {
    // y = all_reduce(x³) on every rank, L = Σ_ranks Σ y · (rank + 1): dL/dx = 3x² · (rank + 1), since upstream is taken as equal on all ranks;
    // its derivative by x is 6x · (rank + 1).
    for n in [1, 2, 3] {
        let outcomes = Ranks::new(n).run(cpu, |comm: Comm<Cpu>| {
            let x = Var::leaf("x", tensor(&comm, comm.rank(), &[4]))?;
            let y = all_reduce(&comm, &x.mul(&x)?.mul(&x)?)?.mul((comm.rank() + 1) as f64)?;
            let first = differentiable_grad(&[&y.sum_all()?], &[&x])?.remove(0).unwrap();
            // The second exchange, of the gradient's gradient, runs too.
            let second = grad(&[&copy(&comm, &first)?.sum_all()?], &[&x])?.remove(0).unwrap();
            Ok((first.value()?.to_vec::<f64>()?, second.value()?.to_vec::<f64>()?))
        });
        for (rank, (first, second)) in outcomes.unwrap().into_iter().enumerate() {
            let (x, k) = (values(rank, 4), (rank + 1) as f64);
            assert_eq!(first, x.iter().map(|x| 3.0 * x * x * k).collect::<Vec<_>>());
            assert_eq!(second, x.iter().map(|x| 6.0 * x * k * n as f64).collect::<Vec<_>>());
        }
    }
}

/// The identity, which gives its gradient on, or has none.
struct Gives(bool);

impl Function<Cpu> for Gives {
    fn name(&self) -> &'static str {
        "gives"
    }

    fn forward(&self, ins: &[Tensor<Cpu>]) -> Result<Vec<Tensor<Cpu>>> {
        Ok(ins.to_vec())
    }

    fn backward(&self, cx: &mut dyn Backprop<Var<Cpu>>) -> Result<()> {
        let upstream = cx.grad()?;
        if self.0 { cx.give_value(0, &upstream) } else { Ok(()) }
    }
}

#[test]
fn a_rank_without_a_gradient_takes_part_with_zeros() {
    let outcomes = Ranks::new(3).run(cpu, |comm: Comm<Cpu>| {
        let x = Var::leaf("x", tensor(&comm, comm.rank(), &[3]))?;
        let seen = apply_function(Arc::new(Gives(comm.rank() != 1)), &[&copy(&comm, &x)?])?.remove(0);
        let gradients = backward(&seen.mul((comm.rank() + 1) as f64)?.sum_all()?)?;
        gradients.get(x.as_leaf().unwrap()).unwrap().to_vec::<f64>()
    });
    // 1 of rank 0, nothing of rank 1, 3 of rank 2.
    assert_eq!(outcomes.unwrap(), vec![vec![4.0; 3]; 3]);
}

#[test]
fn one_rank_exchanges_and_records_nothing() {
    let rt = cpu(0).unwrap();
    let counting = Arc::new(CountingCommunicator::new(Arc::new(NoOpCommunicator::new(&rt))));
    let comm: Comm<Cpu> = counting.clone();
    let x = Var::leaf("x", tensor(&comm, 0, &[2, 4])).unwrap();
    for y in [copy(&comm, &x), all_reduce(&comm, &x), split(&comm, &x, 1), gather(&comm, &x, 0), all_to_all(&comm, &x)]
    {
        assert!(y.unwrap().as_leaf().is_some());
    }
    assert_eq!(counting.total().calls, 0);
}

#[test]
fn parts_that_do_not_come_out_even_are_refused_by_every_rank() {
    let message = |exchange: fn(&Comm<Cpu>, &Var<Cpu>) -> Result<Var<Cpu>>| {
        let outcome = Ranks::new(2).run(cpu, |comm| exchange(&comm, &Var::new(tensor(&comm, 0, &[3, 5]))).map(drop));
        outcome.unwrap_err().to_string()
    };
    let split_up = message(|c, x| split(c, x, 1));
    assert!(
        split_up.contains("split") && split_up.contains("[3, 5]") && split_up.contains("5 along dimension 1"),
        "{split_up}"
    );
    assert!(message(|c, x| reduce_scatter(c, x, 0)).contains("3 along dimension 0"));
    assert!(message(|c, x| gather(c, x, 2)).contains("no dimension 2"));
    assert!(message(all_to_all).contains("equal parts for 2 ranks"));
}
