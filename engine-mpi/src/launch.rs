//! What the launcher says of this process in its environment.

/// This process among those that were started with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The rank, from 0.
    pub rank: usize,
    /// How many processes there are.
    pub size: usize,
    /// The rank among those on the same host: which GPU to take.
    pub local_rank: usize,
}

/// Names of rank, size and local rank: Open MPI's, Slurm's, torchrun's.
const NAMES: [[&str; 3]; 3] = [
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
];

impl Launch {
    /// From the environment: of the first launcher that has named all three. None where a program was started by itself.
    pub fn from_env() -> Option<Launch> {
        Launch::from_lookup(|name| std::env::var(name).ok())
    }

    /// What [`from_env`](Launch::from_env) finds, in any source of variables.
    pub fn from_lookup(get: impl Fn(&str) -> Option<String>) -> Option<Launch> {
        let number = |name: &str| get(name)?.parse().ok();
        NAMES.iter().find_map(|[rank, size, local_rank]| {
            let launch = Launch { rank: number(rank)?, size: number(size)?, local_rank: number(local_rank)? };
            (launch.rank < launch.size).then_some(launch)
        })
    }

    /// Why MPI cannot be right about this process, if Open MPI's `mpirun` says otherwise: it belongs to another installation than the library that
    /// the program has found, which then takes each process for a world of its own.
    #[cfg_attr(not(feature = "open-mpi"), allow(dead_code))]
    pub(crate) fn contradicted(rank: usize, size: usize, get: impl Fn(&str) -> Option<String>) -> Option<String> {
        let [own_rank, all, _] = NAMES[0];
        let number = |name: &str| get(name)?.parse::<usize>().ok();
        let (said_rank, said_size) = (number(own_rank)?, number(all)?);
        ((said_rank, said_size) != (rank, size)).then(|| {
            format!(
                "mpirun has started this process as rank {said_rank} of {said_size}, and the MPI library takes it for rank {rank} of {size}: \
                 `mpirun` and the library are of different installations; see which `PATH` and `LD_LIBRARY_PATH` name"
            )
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
    }

    #[test]
    fn a_launcher_of_another_installation_is_noticed() {
        let said = |rank, size| {
            let get = |name: &str| match name {
                "OMPI_COMM_WORLD_RANK" => Some("3".into()),
                "OMPI_COMM_WORLD_SIZE" => Some("8".into()),
                _ => None,
            };
            Launch::contradicted(rank, size, get)
        };
        assert_eq!(said(3, 8), None);
        let why = said(0, 1).expect("another installation");
        assert!(why.contains("rank 3 of 8") && why.contains("rank 0 of 1"), "{why}");
        assert_eq!(Launch::contradicted(0, 1, |_| None), None);
    }

    #[test]
    fn half_a_launcher_is_none() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("RANK", "1"), ("WORLD_SIZE", "2")]), None);
        assert_eq!(of(&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]), None);
        assert_eq!(of(&[("RANK", "x"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]), None);
    }
}
