//! Rank arithmetic: how ranks are arranged along axes. Pure; built once, passed on explicitly.

use std::fmt;

use numcore::{Error, Result};

/// An axis of the arrangement, from the outermost (least traffic, so it may cross machines) to the innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Stages of a pipeline.
    Pipe,
    /// Replicas: ranks that hold the same parameters and read different data.
    Data,
    /// Shards of one replica: ranks that hold different parts and read different data.
    Shard,
}

impl Axis {
    /// Every axis, outermost first.
    pub const ALL: [Axis; 3] = [Axis::Pipe, Axis::Data, Axis::Shard];

    /// The name of the axis in tables and messages.
    pub fn name(self) -> &'static str {
        ["pipe", "data", "shard"][self as usize]
    }
}

/// How many ranks there are along each axis.
///
/// ```
/// use distributed::plan::{Axis, ParallelPlan};
/// # fn main() -> numcore::Result<()> {
/// let plan = ParallelPlan::new(8, [(Axis::Pipe, 2), (Axis::Shard, 4)])?;
/// assert_eq!(plan.group(Axis::Shard, 5), [4, 5, 6, 7]);
/// assert_eq!(plan.group(Axis::Pipe, 5), [1, 5]);
/// let wrong = ParallelPlan::new(6, [(Axis::Pipe, 4)]).unwrap_err();
/// assert!(wrong.to_string().contains("pipe 4 × data 1 × shard 1 = 4 ranks, the world has 6"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParallelPlan {
    sizes: [usize; Axis::ALL.len()],
}

impl ParallelPlan {
    /// An arrangement of `world` ranks; axes that are not named have size 1. The product of all sizes must be the world.
    pub fn new(world: usize, axes: impl IntoIterator<Item = (Axis, usize)>) -> Result<Self> {
        let mut sizes = [1; Axis::ALL.len()];
        let mut named = [false; Axis::ALL.len()];
        for (axis, size) in axes {
            if size == 0 || std::mem::replace(&mut named[axis as usize], true) {
                let why = format!("axis {} is {}", axis.name(), if size == 0 { "empty" } else { "given twice" });
                return Err(Error::config("ParallelPlan", "axes", why));
            }
            sizes[axis as usize] = size;
        }
        let plan = ParallelPlan { sizes };
        let product = sizes.iter().try_fold(1usize, |p, &s| p.checked_mul(s));
        if product != Some(world) {
            let product = product.map_or_else(|| "too many".into(), |p| p.to_string());
            let why = format!("{plan} = {product} ranks, the world has {world}");
            return Err(Error::config("ParallelPlan", "axes", why));
        }
        Ok(plan)
    }

    /// An arrangement of as many ranks as the product of all sizes.
    pub fn of(axes: impl IntoIterator<Item = (Axis, usize)> + Clone) -> Result<Self> {
        let world = axes.clone().into_iter().try_fold(1usize, |world, (_, size)| world.checked_mul(size));
        ParallelPlan::new(world.unwrap_or(usize::MAX), axes)
    }

    /// All ranks along one axis.
    pub(crate) fn along(axis: Axis, ranks: usize) -> Self {
        let mut sizes = [1; Axis::ALL.len()];
        sizes[axis as usize] = ranks;
        ParallelPlan { sizes }
    }

    /// All ranks.
    pub fn world(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis as usize]
    }

    /// Where a rank stands along an axis.
    pub fn coordinate(&self, axis: Axis, rank: usize) -> usize {
        rank / self.stride(axis) % self.size(axis)
    }

    /// The ranks that differ from `rank` along `axis` alone, itself included, in order.
    pub fn group(&self, axis: Axis, rank: usize) -> Vec<usize> {
        let first = rank - self.coordinate(axis, rank) * self.stride(axis);
        (0..self.size(axis)).map(|k| first + k * self.stride(axis)).collect()
    }

    /// A number that the ranks of one group, and no others, share.
    pub fn color(&self, axes: &[Axis], rank: usize) -> usize {
        let others = Axis::ALL.into_iter().filter(|a| !axes.contains(a));
        others.fold(0, |color, axis| color * self.size(axis) + self.coordinate(axis, rank))
    }

    /// Coordinates of every rank, a line each.
    pub fn table(&self) -> String {
        let header = format!("{:>5}{}\n", "rank", Axis::ALL.map(|a| format!("{:>7}", a.name())).concat());
        let line = |rank| {
            let cells = Axis::ALL.map(|a| format!("{:>7}", self.coordinate(a, rank))).concat();
            format!("{rank:>5}{cells}\n")
        };
        header + &(0..self.world()).map(line).collect::<String>()
    }

    fn stride(&self, axis: Axis) -> usize {
        self.sizes[axis as usize + 1..].iter().product()
    }
}

impl fmt::Display for ParallelPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Axis::ALL.map(|a| format!("{} {}", a.name(), self.size(a))).join(" × "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_partition_the_world_along_every_axis() {
        let plan = ParallelPlan::new(24, [(Axis::Pipe, 2), (Axis::Data, 3), (Axis::Shard, 4)]).unwrap();
        for axis in Axis::ALL {
            let mut seen = vec![0; 24];
            for rank in 0..24 {
                let group = plan.group(axis, rank);
                assert_eq!(group[plan.coordinate(axis, rank)], rank);
                assert!(group.iter().all(|&r| plan.group(axis, r) == group));
                assert!(group.iter().all(|&r| plan.color(&[axis], r) == plan.color(&[axis], rank)));
                seen[rank] += group.len();
            }
            assert_eq!(seen, vec![plan.size(axis); 24]);
        }
        assert_eq!(plan.table().lines().count(), 25);
        assert_eq!(plan.table().lines().nth(24), Some("   23      1      2      3"));
    }

    #[test]
    fn impossible_products_are_refused() {
        for (world, axes) in
            [(4, vec![(Axis::Data, 3)]), (1, vec![(Axis::Pipe, 0)]), (4, vec![(Axis::Data, 2), (Axis::Data, 2)])]
        {
            assert!(ParallelPlan::new(world, axes).is_err());
        }
        let huge = ParallelPlan::new(2, [(Axis::Data, usize::MAX), (Axis::Pipe, 2)]).unwrap_err();
        assert!(huge.to_string().contains("too many"), "{huge}");
    }
}
