//! An exchange of bytes over an engine that mistakes their lengths: an error, and no memory of that size.

use std::{panic::Location, sync::Arc, time::Duration};

use comm::{Call, Collectives, Comm, Communicator, Group, Guarantees, Work};
use numcore::{Error, Result, Tensor, TensorMut, ops::Op};
use runtime_cpu::Cpu;

/// An engine that gives every call these numbers.
#[derive(Debug)]
struct Mistaken {
    rt: Cpu,
    group: Group,
    lengths: Vec<i64>,
}

impl Communicator<Cpu> for Mistaken {
    fn group(&self) -> &Group {
        &self.group
    }

    fn runtime(&self) -> &Cpu {
        &self.rt
    }

    fn timeout(&self) -> Duration {
        Duration::MAX
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees { exchanges_on_host: false, ..Guarantees::STRICT }
    }

    fn next_number(&self) -> u64 {
        0
    }

    fn start(&self, call: Call<Cpu>) -> Result<Work<Option<TensorMut<Cpu>>>> {
        let (_, output) = call.into_memory();
        let mut out = output.ok_or_else(|| Error::argument("start", "no memory"))?;
        assert_eq!(out.shape().numel(), self.lengths.len(), "memory of what was mistaken");
        out.reset();
        out.accumulate(&Op::identity(), &[&Tensor::from_slice(&self.rt, [self.lengths.len()], &self.lengths)?])?;
        Ok(Work::ready(Some(out)))
    }

    fn split_at(&self, _: Option<usize>, _: usize, _: &'static Location<'static>) -> Result<Option<Comm<Cpu>>> {
        Ok(None)
    }

    fn poll(&self) -> Result<()> {
        Ok(())
    }

    fn abort_for(&self, _: usize, _: &str) {}
}

fn exchanged(lengths: &[i64]) -> Result<Vec<Vec<u8>>> {
    let group = Group::world(1, lengths.len());
    let comm: Comm<Cpu> = Arc::new(Mistaken { rt: Cpu::with_threads(1), group, lengths: lengths.to_vec() });
    comm.exchange(b"seven")
}

#[test]
fn lengths_whose_sum_overflows_are_an_error() {
    // Three of them are more than a `usize` of 64 bits holds, and two wrap to less than one.
    for lengths in [&[i64::MAX, i64::MAX, i64::MAX][..], &[5, i64::MAX, i64::MAX, 2]] {
        let error = exchanged(lengths).unwrap_err();
        assert_eq!(error.rank(), Some(1), "{error}");
        assert!(error.to_string().contains(&format!("ranks have sent {lengths:?} bytes")), "{error}");
    }
}

#[test]
fn lengths_below_zero_are_an_error() {
    let error = exchanged(&[-1, 5]).unwrap_err().to_string();
    assert!(error.contains("ranks have sent [-1, 5] bytes"), "{error}");
}

#[test]
fn more_than_there_is_memory_for_is_an_error() {
    assert!(exchanged(&[i64::MAX, 5]).is_err());
}

#[test]
fn nothing_from_anyone_is_nothing() {
    assert_eq!(exchanged(&[0, 0, 0]).unwrap(), vec![Vec::<u8>::new(); 3]);
}
