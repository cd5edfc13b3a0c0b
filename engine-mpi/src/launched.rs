//! A check that `mpirun` and the library are of one installation.

/// Returns the reason that MPI's rank and size must be wrong, if they differ from those that Open MPI's `mpirun` has
/// set. `mpirun` then belongs to another installation than the library, which takes each process for a world of its
/// own.
#[cfg_attr(not(feature = "open-mpi"), allow(dead_code, reason = "tested without MPI too"))]
pub(crate) fn launcher_mismatch(rank: usize, size: usize, get: impl Fn(&str) -> Option<String>) -> Option<String> {
    let number = |name: &str| get(name)?.parse::<usize>().ok();
    let (said_rank, said_size) = (number("OMPI_COMM_WORLD_RANK")?, number("OMPI_COMM_WORLD_SIZE")?);
    ((said_rank, said_size) != (rank, size)).then(|| {
        format!(
            "mpirun has started this process as rank {said_rank} of {said_size}, and the MPI library takes it for rank {rank} of {size}: \
             `mpirun` and the library are of different installations; see which `PATH` and `LD_LIBRARY_PATH` name"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_of_another_installation_is_noticed() {
        let mismatch = |rank, size| {
            let get = |name: &str| match name {
                "OMPI_COMM_WORLD_RANK" => Some("3".into()),
                "OMPI_COMM_WORLD_SIZE" => Some("8".into()),
                _ => None,
            };
            launcher_mismatch(rank, size, get)
        };
        assert_eq!(mismatch(3, 8), None);
        let why = mismatch(0, 1).expect("another installation");
        assert!(why.contains("rank 3 of 8") && why.contains("rank 0 of 1"), "{why}");
        assert_eq!(launcher_mismatch(0, 1, |_| None), None);
    }
}
