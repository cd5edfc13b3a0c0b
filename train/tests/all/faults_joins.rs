//! Ranks that are lost while others join them, and newcomers that are lost while they join.

use std::time::Instant;

use distributed::comm::{Membership, Rendezvous};
use engine_process::ProcessRendezvous;

use crate::{
    faults_plans::{FaultPlan, Second, signal},
    prelude::*,
};

/// A rendezvous whose worlds do not go on for long without newcomers in the place of lost ranks.
pub struct AwaitedRendezvous {
    inner: ProcessRendezvous<Cpu>,
    plan: FaultPlan,
    /// True if this process is lost while others join.
    is_victim: bool,
    /// The rank and the size of the last world.
    place: (usize, usize),
    /// Commits that wait for nobody.
    spared: Mutex<u64>,
}

impl AwaitedRendezvous {
    pub fn new(inner: ProcessRendezvous<Cpu>, plan: FaultPlan, is_victim: bool) -> Self {
        AwaitedRendezvous { inner, plan, is_victim, place: (0, plan.ranks), spared: Mutex::new(plan.save % 3) }
    }
}

impl Rendezvous<Cpu> for AwaitedRendezvous {
    fn next_world(&mut self) -> Result<Membership<Cpu>> {
        // Ranks meet newcomers if any are short, or find the losses of others.
        if self.is_victim && self.place.1 < self.plan.ranks {
            let later = self.plan.later;
            std::thread::spawn(move || {
                sleep(later);
                signal("KILL");
            });
        }
        let world = self.inner.next_world()?;
        self.place = (world.comm.rank(), world.comm.size());
        Ok(world)
    }

    fn newcomers(&self) -> usize {
        let begun = Instant::now();
        let (rank, size) = self.place;
        let mut spared = self.spared.lock().unwrap();
        if rank != 0 || size == self.plan.ranks || *spared > 0 {
            *spared = spared.saturating_sub(u64::from(size < self.plan.ranks));
            return self.inner.newcomers();
        }
        loop {
            match self.inner.newcomers() {
                0 if begun.elapsed() < Duration::from_secs(60) => sleep(Duration::from_millis(5)),
                count => return count,
            }
        }
    }

    fn committed(&mut self) {
        self.inner.committed();
    }
}

/// Lets a newcomer be lost while it joins, if the plan says so.
pub fn perhaps_lost(plan: &FaultPlan, start: u64) {
    if let (Some(Second::Newcomer), 1) = (plan.second, start) {
        let later = plan.later;
        std::thread::spawn(move || {
            sleep(later);
            signal("KILL");
        });
    }
}
