//! The launcher's description of this process in environment variables.

/// The rank of this process and the number of processes that were launched with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The rank, from 0.
    pub rank: usize,
    /// The number of processes.
    pub size: usize,
    /// The rank among the processes on the same host, which usually selects the GPU.
    pub local_rank: usize,
}

/// Names of the variables of rank, size and local rank, as set by Open MPI, torchrun and Slurm. Slurm comes last,
/// because it may start the other two.
const NAMES: [[&str; 3]; 3] = [
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
];

impl Launch {
    /// Reads the environment: the first launcher that has set all three variables counts. `None` if a program was
    /// started without a launcher.
    pub fn from_env() -> Option<Launch> {
        Launch::from_lookup(|name| std::env::var(name).ok())
    }

    /// Reads variables as [`from_env`](Launch::from_env) does, from any source.
    pub fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Option<Launch> {
        let number = |name: &str| get(name)?.parse().ok();
        NAMES.iter().find_map(|[rank, size, local_rank]| {
            let launch = Launch { rank: number(rank)?, size: number(size)?, local_rank: number(local_rank)? };
            (launch.rank < launch.size).then_some(launch)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(vars: &[(&str, &str)]) -> Option<(usize, usize, usize)> {
        let get = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        Launch::from_lookup(get).map(|l| (l.rank, l.size, l.local_rank))
    }

    #[test]
    fn every_launcher_is_understood() {
        let ompi = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
        let slurm = [("SLURM_PROCID", "5"), ("SLURM_NTASKS", "6"), ("SLURM_LOCALID", "2")];
        let torch = [("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")];
        assert_eq!(of(&ompi), Some((3, 8, 1)));
        assert_eq!(of(&slurm), Some((5, 6, 2)));
        assert_eq!(of(&torch), Some((1, 2, 0)));
        assert_eq!(of(&[&torch[..], &slurm, &ompi].concat()), Some((3, 8, 1)), "mpirun inside of Slurm");
        assert_eq!(of(&[&slurm[..], &torch].concat()), Some((1, 2, 0)), "torchrun inside of Slurm");
    }

    #[test]
    fn half_a_launcher_is_none() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("RANK", "1"), ("WORLD_SIZE", "2")]), None);
        assert_eq!(of(&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]), None);
        assert_eq!(of(&[("RANK", "x"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]), None);
    }
}
