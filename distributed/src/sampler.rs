//! The examples of each rank, for a loop without a loader. `data::Loader` is PyTorch's `DataLoader` and
//! `DistributedSampler`.

/// The indices of the examples of rank `rank` of `n`: every `n`-th of `len`.
///
/// ```
/// assert_eq!(distributed::sampler::shard_batches(7, 0, 3), [0, 3, 6]);
/// ```
pub fn shard_batches(len: usize, rank: usize, n: usize) -> Vec<usize> {
    (rank..len).step_by(n.max(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_read_everything_once() {
        for (ranks, len) in [(1, 7), (3, 7), (8, 7), (5, 0), (2, 40)] {
            let mut all: Vec<usize> = (0..ranks).flat_map(|rank| shard_batches(len, rank, ranks)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..len).collect::<Vec<_>>());
        }
    }
}
