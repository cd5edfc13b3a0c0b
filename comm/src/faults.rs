//! Injected faults, to test that a fault of one rank ends as an error on all.

use std::{
    panic::Location,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use numcore::{Error, Result, Runtime, TensorMut, rng::Philox};

use super::{ByteExchange, Call, Comm, Communicator, Membership, Rendezvous, Work, communicator::of_inner};

/// The kind of an injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call is made this much later. A delay longer than the timeout means that the rank never arrives.
    Delay(Duration),
    /// The call is left out, as by a program that has taken another branch. In a group of one, where no other rank
    /// could notice, it is an error.
    Skip,
    /// The call returns an error.
    Error,
    /// The call panics.
    Panic,
}

impl Fault {
    /// Draws a fault, and the number of the call that it hits, out of the first `calls`; delays are short.
    pub fn seeded(seed: u64, calls: u64) -> (u64, Fault) {
        let mut random = Philox::new(seed, 0);
        let at = random.below(calls.max(1));
        let fault = match random.below(4) {
            0 => Fault::Delay(Duration::from_millis(random.below(20))),
            1 => Fault::Skip,
            2 => Fault::Error,
            _ => Fault::Panic,
        };
        (at, fault)
    }
}

/// A communicator on which one call has a fault.
#[derive(Debug)]
pub struct FaultyCommunicator<R: Runtime> {
    inner: Comm<R>,
    at: u64,
    fault: Fault,
    calls: Arc<AtomicU64>,
}

impl<R: Runtime> FaultyCommunicator<R> {
    /// Injects a fault at call number `at` (from 0, calls of groups split from it included).
    pub fn new(inner: Comm<R>, at: u64, fault: Fault) -> Self {
        FaultyCommunicator { inner, at, fault, calls: Arc::default() }
    }
}

impl<R: Runtime> FaultyCommunicator<R> {
    /// Counts a call, and injects the fault if it is due: true if the call is left out.
    fn inject(&self, op: &'static str) -> Result<bool> {
        if self.calls.fetch_add(1, Ordering::Relaxed) != self.at {
            return Ok(false);
        }
        match self.fault {
            Fault::Delay(time) => {
                std::thread::sleep(time);
                Ok(false)
            }
            Fault::Skip if self.size() > 1 => Ok(true),
            Fault::Skip | Fault::Error => Err(Error::argument(op, "an error on purpose").on_rank(self.world_rank())),
            Fault::Panic => panic!("a panic on purpose, in {op}"),
        }
    }

    fn exchange_on_host(&self, exchange: ByteExchange<'_>) -> Result<Vec<Vec<u8>>> {
        match self.inject("all_gather")? {
            true => Ok(vec![Vec::new(); self.size()]),
            false => self.inner.exchange_bytes(exchange),
        }
    }
}

impl<R: Runtime> Communicator<R> for FaultyCommunicator<R> {
    of_inner!();

    fn guarantees(&self) -> super::Guarantees {
        self.inner.guarantees()
    }

    fn start_all(&self, mut calls: Vec<Call<R>>) -> Result<Vec<Work<Option<TensorMut<R>>>>> {
        let mut left_out = None;
        for (k, call) in calls.iter().enumerate() {
            if self.inject(call.what().name())? {
                left_out = Some(k);
            }
        }
        let Some(k) = left_out else { return self.inner.start_all(calls) };
        let untouched = calls.remove(k).into_memory().1;
        let mut works = self.inner.start_all(calls)?;
        works.insert(k, Work::ready(untouched));
        Ok(works)
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let (at_call, fault, calls) = (self.at, self.fault, self.calls.clone());
        let inner = self.inner.split_at(color, key, at)?;
        Ok(inner.map(|inner| Arc::new(FaultyCommunicator { inner, at: at_call, fault, calls }) as Comm<R>))
    }
}

/// A rank's side of a rendezvous, in whose worlds calls have faults.
#[derive(Debug)]
pub struct FaultyRendezvous<T> {
    inner: T,
    faults: Vec<(u64, u64, Fault)>,
}

impl<T> FaultyRendezvous<T> {
    /// Injects faults, each given by the number of a world, the number of a call of this rank in it, and the kind.
    pub fn new(inner: T, faults: Vec<(u64, u64, Fault)>) -> Self {
        FaultyRendezvous { inner, faults }
    }
}

impl<R: Runtime, T: Rendezvous<R>> Rendezvous<R> for FaultyRendezvous<T> {
    fn next_world(&mut self) -> Result<Membership<R>> {
        let mut world = self.inner.next_world()?;
        for (_, at, fault) in self.faults.iter().filter(|(of, ..)| *of == world.generation) {
            world.comm = Arc::new(FaultyCommunicator::new(world.comm, *at, *fault));
        }
        Ok(world)
    }

    fn newcomers(&self) -> usize {
        self.inner.newcomers()
    }

    fn committed(&mut self) {
        self.inner.committed();
    }
}
