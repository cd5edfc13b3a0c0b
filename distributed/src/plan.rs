//! Arithmetic of ranks along axes, without communication. A plan is built once, and passed on explicitly.

use std::fmt;

use numcore::{Error, Result, Within};

/// An axis of the arrangement, from the outermost (least traffic, so it may cross machines) to the innermost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Axis {
    /// Stages of a pipeline.
    Pipe,
    /// Replicas: ranks that hold the same parameters and read different data.
    Data,
    /// Shards of one replica: ranks that hold different parts and read different data.
    Shard,
    /// Parts of each sequence: ranks that hold the same parameters and read parts of the same data.
    Context,
    /// Parts of each layer: ranks that hold different pieces of the parameters and read the same data.
    Tensor,
    /// Experts of each mixture: ranks that hold different experts and read different tokens.
    ///
    /// This axis is no factor of the world. It is laid over the ranks along [`GRADIENTS`](Axis::GRADIENTS): consecutive
    /// ones have all experts together.
    Expert,
}

impl Axis {
    /// Every axis that the world is a product of, outermost first.
    pub const ALL: [Axis; 5] = [Axis::Pipe, Axis::Data, Axis::Shard, Axis::Context, Axis::Tensor];

    /// The axes along which ranks read different data.
    pub const EXAMPLES: [Axis; 2] = [Axis::Data, Axis::Shard];

    /// The axes over which gradients and losses are summed: along these, ranks read different tokens.
    pub const GRADIENTS: [Axis; 3] = [Axis::Data, Axis::Shard, Axis::Context];

    /// The axes along which ranks take a step of one model, or of one stage, together: they decide alike.
    pub(crate) const STEP: &[Axis] = Axis::ALL.split_at(1).1;

    /// The name of the axis in tables and messages.
    pub fn name(self) -> &'static str {
        ["pipe", "data", "shard", "context", "tensor", "expert"][self as usize]
    }
}

/// The number of ranks along each axis.
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
    /// The number of ranks along [`Axis::GRADIENTS`] that have all experts together.
    experts: usize,
}

impl ParallelPlan {
    /// An arrangement of `world` ranks. Axes that are not named have size 1.
    ///
    /// # Errors
    /// Fails if the product of all sizes but that of [`Axis::Expert`] is not `world`. The size of [`Axis::Expert`] must
    /// divide the number of ranks that read different tokens. An axis of size 0 or named twice is an error too.
    #[track_caller]
    pub fn new(world: usize, axes: impl IntoIterator<Item = (Axis, usize)>) -> Result<Self> {
        let (mut sizes, mut experts) = ([1; Axis::ALL.len()], 1);
        let mut named = [false; Axis::ALL.len() + 1];
        for (axis, size) in axes {
            if size == 0 || std::mem::replace(&mut named[axis as usize], true) {
                let why = format!("axis {} is {}", axis.name(), if size == 0 { "empty" } else { "given twice" });
                return Err(Error::config("ParallelPlan", "axes", why)).at_caller();
            }
            *sizes.get_mut(axis as usize).unwrap_or(&mut experts) = size;
        }
        let plan = ParallelPlan { sizes, experts };
        let product = sizes.iter().try_fold(1usize, |p, &s| p.checked_mul(s));
        if product != Some(world) {
            let product = product.map_or_else(|| "too many".into(), |p| p.to_string());
            let why = format!("{plan} = {product} ranks, the world has {world}");
            return Err(Error::config("ParallelPlan", "axes", why)).at_caller();
        }
        let ranks = plan.readers();
        if !ranks.is_multiple_of(experts) {
            let why = format!(
                "experts cannot be laid over groups of {experts} of the {ranks} ranks along data, shard and context, which {experts} does not divide"
            );
            return Err(Error::config("ParallelPlan", "axes", why)).at_caller();
        }
        Ok(plan)
    }

    /// An arrangement of as many ranks as the product of all sizes but that of [`Axis::Expert`].
    #[track_caller]
    pub fn of(axes: impl IntoIterator<Item = (Axis, usize)> + Clone) -> Result<Self> {
        let factors = axes.clone().into_iter().filter(|(axis, _)| *axis != Axis::Expert);
        let world = factors.into_iter().try_fold(1usize, |world, (_, size)| world.checked_mul(size));
        ParallelPlan::new(world.unwrap_or(usize::MAX), axes)
    }

    /// An arrangement of all ranks along one axis.
    pub(crate) fn along(axis: Axis, ranks: usize) -> Self {
        let mut sizes = [1; Axis::ALL.len()];
        sizes[axis as usize] = ranks;
        ParallelPlan { sizes, experts: 1 }
    }

    /// The ranks of one step that read different tokens, arranged for experts: ranks along tensor have different
    /// experts. Copies of an expert lie along shard if the expert axis divides the ranks along shard and context.
    /// Copies beyond those lie along data.
    pub fn of_experts(&self) -> Self {
        let (shard, experts) = (self.size(Axis::Shard) * self.size(Axis::Context), self.experts);
        let shards = if shard.is_multiple_of(experts) { shard / experts } else { 1 };
        let mut plan = ParallelPlan::along(Axis::Tensor, experts);
        plan.sizes[Axis::Shard as usize] = shards;
        plan.sizes[Axis::Data as usize] = self.readers() / experts / shards;
        plan
    }

    /// The number of ranks that read different tokens.
    fn readers(&self) -> usize {
        Axis::GRADIENTS.iter().map(|&axis| self.size(axis)).product()
    }

    /// The place of a rank among those that read different tokens.
    fn reader(&self, rank: usize) -> usize {
        Axis::GRADIENTS.iter().fold(0, |place, &axis| place * self.size(axis) + self.coordinate(axis, rank))
    }

    /// The number of all ranks.
    pub fn world(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The number of ranks along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes.get(axis as usize).copied().unwrap_or(self.experts)
    }

    /// The position of a rank along an axis.
    pub fn coordinate(&self, axis: Axis, rank: usize) -> usize {
        if axis == Axis::Expert {
            return self.reader(rank) % self.experts;
        }
        rank / self.stride(axis) % self.size(axis)
    }

    /// The ranks that differ from `rank` along `axis` alone, itself included, in order.
    pub fn group(&self, axis: Axis, rank: usize) -> Vec<usize> {
        if axis == Axis::Expert {
            let color = |rank| self.color(&[Axis::Expert], rank);
            return (0..self.world()).filter(|&other| color(other) == color(rank)).collect();
        }
        let first = rank - self.coordinate(axis, rank) * self.stride(axis);
        (0..self.size(axis)).map(|k| first + k * self.stride(axis)).collect()
    }

    /// A number that is shared by the ranks of one group, and no others. [`Axis::Expert`] beside other axes stands for
    /// the axes that it is laid over.
    pub fn color(&self, axes: &[Axis], rank: usize) -> usize {
        if axes == [Axis::Expert] {
            let groups = self.readers() / self.experts;
            return self.color(&Axis::GRADIENTS, rank) * groups + self.reader(rank) / self.experts;
        }
        let all = |axis: &Axis| axes.contains(axis) || axes.contains(&Axis::Expert) && Axis::GRADIENTS.contains(axis);
        let others = Axis::ALL.into_iter().filter(|axis| !all(axis));
        others.fold(0, |color, axis| color * self.size(axis) + self.coordinate(axis, rank))
    }

    /// Coordinates of every rank, a line for each.
    pub fn table(&self) -> String {
        let cells = |of: &dyn Fn(Axis) -> String| self.shown().map(|a| format!("{:>9}", of(a))).collect::<String>();
        let header = format!("{:>5}{}\n", "rank", cells(&|a| a.name().into()));
        let line = |rank| format!("{rank:>5}{}\n", cells(&|a| self.coordinate(a, rank).to_string()));
        header + &(0..self.world()).map(line).collect::<String>()
    }

    /// The axes that tables show: inner ones of size 1 are left out.
    fn shown(&self) -> impl Iterator<Item = Axis> + '_ {
        Axis::ALL.into_iter().chain([Axis::Expert]).filter(|&axis| axis <= Axis::Shard || self.size(axis) > 1)
    }

    /// The difference of the numbers of neighbouring ranks along an axis of `Axis::ALL`.
    fn stride(&self, axis: Axis) -> usize {
        self.sizes[axis as usize + 1..].iter().product()
    }
}

impl fmt::Display for ParallelPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let factors = self.shown().filter(|&axis| axis != Axis::Expert);
        f.write_str(&factors.map(|a| format!("{} {}", a.name(), self.size(a))).collect::<Vec<_>>().join(" × "))?;
        if self.experts > 1 { write!(f, ", expert {}", self.experts) } else { Ok(()) }
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
        assert_eq!(plan.table().lines().nth(24), Some("   23        1        2        3"));
    }

    #[test]
    fn tensor_is_innermost_and_shown_where_it_is() {
        let plan = ParallelPlan::of([(Axis::Tensor, 2), (Axis::Data, 3)]).unwrap();
        assert_eq!(plan.to_string(), "pipe 1 × data 3 × shard 1 × tensor 2");
        assert_eq!(plan.group(Axis::Tensor, 3), [2, 3]);
        assert_eq!(plan.group(Axis::Data, 3), [1, 3, 5]);
        assert_eq!(plan.color(&[Axis::Data, Axis::Tensor], 0), plan.color(&[Axis::Data, Axis::Tensor], 5));
        assert_eq!(plan.table().lines().next(), Some(" rank     pipe     data    shard   tensor"));
    }

    #[test]
    fn experts_are_laid_over_consecutive_ranks_that_read_different_tokens() {
        let plan = ParallelPlan::of([(Axis::Data, 2), (Axis::Shard, 2), (Axis::Tensor, 2), (Axis::Expert, 2)]).unwrap();
        assert_eq!((plan.world(), plan.size(Axis::Expert)), (8, 2));
        assert_eq!(plan.to_string(), "pipe 1 × data 2 × shard 2 × tensor 2, expert 2");
        assert_eq!([0, 3, 6].map(|rank| plan.group(Axis::Expert, rank)), [[0, 2], [1, 3], [4, 6]]);
        assert_eq!([0, 2, 5].map(|rank| plan.coordinate(Axis::Expert, rank)), [0, 1, 0]);
        assert_eq!(plan.of_experts().to_string(), "pipe 1 × data 2 × shard 1 × tensor 2");
        for (axes, experts) in [
            (&[(Axis::Data, 4)][..], "pipe 1 × data 2 × shard 1 × tensor 2"),
            (&[(Axis::Shard, 4)], "pipe 1 × data 1 × shard 2 × tensor 2"),
            (&[(Axis::Data, 3), (Axis::Shard, 4)], "pipe 1 × data 3 × shard 2 × tensor 2"),
            (&[(Axis::Data, 2), (Axis::Shard, 3)], "pipe 1 × data 3 × shard 1 × tensor 2"),
            (&[(Axis::Data, 2), (Axis::Context, 2)], "pipe 1 × data 2 × shard 1 × tensor 2"),
            (&[(Axis::Shard, 2), (Axis::Context, 2)], "pipe 1 × data 1 × shard 2 × tensor 2"),
        ] {
            let axes: Vec<_> = axes.iter().copied().chain([(Axis::Expert, 2)]).collect();
            assert_eq!(ParallelPlan::of(axes).unwrap().of_experts().to_string(), experts);
        }
        let all = ParallelPlan::of([(Axis::Pipe, 2), (Axis::Data, 2), (Axis::Shard, 2), (Axis::Expert, 4)]).unwrap();
        assert_eq!(all.group(Axis::Expert, 5), [4, 5, 6, 7]);
        let cut =
            ParallelPlan::of([(Axis::Data, 2), (Axis::Context, 2), (Axis::Tensor, 2), (Axis::Expert, 2)]).unwrap();
        assert_eq!([0, 3, 6].map(|rank| cut.group(Axis::Expert, rank)), [[0, 2], [1, 3], [4, 6]]);
        let color = |rank| plan.color(&[Axis::Tensor, Axis::Expert], rank);
        assert!((0..8).all(|rank| color(rank) == color(0)), "beside others it is data and shard");
    }

    #[test]
    fn experts_that_ranks_cannot_share_out_are_refused() {
        let error = |axes: &[(Axis, usize)]| ParallelPlan::of(axes.to_vec()).unwrap_err().to_string();
        let why = error(&[(Axis::Data, 3), (Axis::Shard, 2), (Axis::Tensor, 2), (Axis::Expert, 4)]);
        assert!(why.contains("groups of 4 of the 6 ranks along data, shard and context"), "{why}");
        assert!(error(&[(Axis::Data, 2), (Axis::Expert, 0)]).contains("axis expert is empty"));
        assert!(error(&[(Axis::Expert, 2), (Axis::Data, 2), (Axis::Expert, 2)]).contains("axis expert is given twice"));
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
