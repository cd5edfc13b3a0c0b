//! Elastic runs whose ranks are threads: of a first world, and of one that joins it.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{scope, yield_now},
    time::Duration,
};

use adaptive::elastic::{Elastic, ElasticWorld};
use distributed::comm::{Fault, FaultyRendezvous, Quorum, Rendezvous, ThreadRendezvous, ThreadSeat};
use numcore::Result;
use runtime_cpu::Cpu;

pub fn rendezvous(ranks: usize, quorum: Quorum) -> (ThreadRendezvous<Cpu>, Vec<ThreadSeat<Cpu>>) {
    let runtimes = (0..ranks).map(|_| Cpu::with_threads(1)).collect();
    ThreadRendezvous::new(runtimes, quorum, Duration::from_secs(60)).unwrap()
}

/// The outcomes of `ranks` ranks; `copies` others hold a copy of each rank's commits.
pub fn elastic<T: Send>(
    ranks: usize,
    copies: usize,
    program: impl Fn(&mut ElasticWorld<Cpu>) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let (_rendezvous, seats) = rendezvous(ranks, Quorum::default());
    Elastic::on_threads(seats, |elastic| elastic.copies(copies), program)
}

/// A rank that joins a run when it is asked to.
pub struct Newcomer {
    asked: AtomicBool,
    /// It never meets: it only sees who waits.
    probe: Mutex<ThreadSeat<Cpu>>,
}

impl Newcomer {
    /// Lets it come, and returns once it waits to be taken in.
    pub fn come(&self) {
        self.asked.store(true, Ordering::SeqCst);
        while self.probe.lock().unwrap().newcomers() == 0 {
            yield_now();
        }
    }
}

/// The outcomes of `ranks` ranks with these faults, and last the newcomer's.
pub fn joined<T: Send>(
    ranks: usize,
    faults: impl Fn(usize) -> Vec<(u64, u64, Fault)>,
    first: impl Fn(&mut ElasticWorld<Cpu>, &Newcomer) -> Result<T> + Sync,
    last: impl FnOnce(Elastic<Cpu>) -> Result<T> + Send,
) -> Vec<Result<T>> {
    let (rendezvous, seats) = rendezvous(ranks, Quorum::default());
    let probe = Mutex::new(rendezvous.join(Cpu::with_threads(1)));
    let newcomer = Newcomer { asked: AtomicBool::new(false), probe };
    let seats = seats.into_iter().enumerate().map(|(k, seat)| FaultyRendezvous::new(seat, faults(k))).collect();
    scope(|scope| {
        let last = scope.spawn(|| {
            while !newcomer.asked.load(Ordering::SeqCst) {
                yield_now();
            }
            last(Elastic::new(rendezvous.join(Cpu::with_threads(1))))
        });
        let mut outcomes = Elastic::on_threads(seats, |elastic| elastic, |world| first(world, &newcomer));
        // A run that has ended did not ask.
        newcomer.asked.store(true, Ordering::SeqCst);
        outcomes.push(last.join().unwrap());
        outcomes
    })
}
