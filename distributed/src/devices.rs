//! The devices of all ranks.

use std::fmt;

use numcore::{Result, Runtime};

use crate::comm::{Collectives, Comm, Communicator};

/// The device of each rank, for a summary at the start of a run.
///
/// ```
/// use distributed::{RankDevices, comm::{Comm, NoOpCommunicator}};
/// use numcore::NullRuntime;
/// # use std::sync::Arc;
/// # fn main() -> numcore::Result<()> {
/// let comm: Comm<_> = Arc::new(NoOpCommunicator::new(&NullRuntime::new()));
/// let devices = RankDevices::of(&comm)?;
/// assert!(!devices.is_heterogeneous());
/// println!("{devices}");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankDevices(Vec<String>);

impl RankDevices {
    /// The devices of the ranks of a communicator. Collective: every rank calls it.
    pub fn of<R: Runtime>(comm: &Comm<R>) -> Result<Self> {
        let device = comm.runtime().capabilities();
        let own = match device.parallelism {
            1 => device.name.clone(),
            threads => format!("{}, {threads} threads or processors", device.name),
        };
        let all = comm.exchange(own.as_bytes())?;
        Ok(RankDevices(all.into_iter().map(|name| String::from_utf8_lossy(&name).into_owned()).collect()))
    }

    /// The description of each rank's device, by rank.
    pub fn names(&self) -> &[String] {
        &self.0
    }

    /// A line for each kind of device, and advice if ranks have different ones.
    pub fn summary(&self) -> String {
        match self.is_heterogeneous() {
            true => format!("{self}\nthese differ: `balance::Balanced` gives faster ranks more to do"),
            false => self.to_string(),
        }
    }

    /// Tells whether ranks have different devices, so that one may wait for another in every step:
    /// `adaptive::balance` gives faster ranks more work.
    pub fn is_heterogeneous(&self) -> bool {
        self.0.iter().any(|name| *name != self.0[0])
    }
}

/// A line for each kind of device, with the ranks that have it.
impl fmt::Display for RankDevices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut kinds: Vec<(&String, Vec<String>)> = Vec::new();
        for (rank, name) in self.0.iter().enumerate() {
            match kinds.iter_mut().find(|(kind, _)| *kind == name) {
                Some((_, ranks)) => ranks.push(rank.to_string()),
                None => kinds.push((name, vec![rank.to_string()])),
            }
        }
        let lines = kinds.iter().map(|(name, ranks)| {
            format!("rank{} {}: {name}", if ranks.len() == 1 { "" } else { "s" }, ranks.join(", "))
        });
        f.write_str(&lines.collect::<Vec<_>>().join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_a_line_for_each_kind() {
        let of = |names: &[&str]| RankDevices(names.iter().map(|name| name.to_string()).collect());
        let mixed = of(&["A", "B", "A"]);
        assert_eq!(mixed.to_string(), "ranks 0, 2: A\nrank 1: B");
        assert!(mixed.summary().contains("these differ") && !of(&["A"]).summary().contains("differ"));
        assert!(mixed.is_heterogeneous() && !of(&["A", "A"]).is_heterogeneous());
    }
}
