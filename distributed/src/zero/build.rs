//! The division of a model's parameters into units, and of those that may not be cut among shards.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use autograd::Leaf;
use nn::parallel::Placed;
use numcore::{DType, Error, Result, Runtime};
use optim::{CutParam, Shards};

use super::{
    ZeroOptions,
    layout::owners,
    options::ShardGroups,
    unit::{Unit, UnitParameters},
};
use crate::{comm::Communicator, strategy::TensorAxis};

/// Makes the units. Parameters of one unit name, dtype and trainability share a buffer. Within it they are ordered by
/// optimizer group, so that an update is few launches. Pieces that differ in size along tensor share another buffer. So
/// these ranks cut all others into the same shards, and sum partial gradients there.
pub(super) fn build<R: Runtime>(
    groups: &ShardGroups<R>,
    tensor: &TensorAxis<R>,
    named: Vec<(String, Arc<Leaf<R>>)>,
    units: Vec<String>,
    optimizer: &dyn Shards<R>,
    options: &ZeroOptions,
) -> Result<Vec<Unit<R>>> {
    type Key = (String, DType, bool, bool);
    let mut parts: Vec<(Key, Vec<Arc<Leaf<R>>>)> = Vec::new();
    let mut seen = HashSet::new();
    for ((_, leaf), unit) in named.into_iter().zip(units).filter(|((_, l), _)| seen.insert(l.id())) {
        let (smallest, largest) = tensor.piece_sizes(&leaf);
        let key = (unit, leaf.spec().dtype, leaf.requires_grad(), smallest == largest);
        match parts.iter_mut().find(|(k, _)| *k == key) {
            Some((_, leaves)) => leaves.push(leaf),
            None => parts.push((key, vec![leaf])),
        }
    }
    // The elements of all parts of a unit, which are read together, on the rank along tensor that has the most.
    let mut elements: HashMap<String, usize> = HashMap::new();
    for ((name, ..), leaves) in &parts {
        let here: usize = leaves.iter().map(|leaf| tensor.piece_sizes(leaf).1).sum();
        *elements.entry(name.clone()).or_default() += here;
    }
    let mut loads = vec![0; groups.shard.size()];
    // The work of the ranks along tensor that have the same shard, for each shard.
    let mut work = vec![Vec::new(); groups.shard.size()];
    let unit = |((name, dtype, trained, _), mut leaves): (Key, Vec<Arc<Leaf<R>>>)| {
        leaves.sort_by_key(|l| optimizer.group(&l.name(), &l.spec()));
        let owners = (!may_cut(optimizer, &leaves)).then(|| {
            // Of whole parameters: pieces may differ in size, and ranks along tensor have those of the same parameters.
            let sizes: Vec<usize> = leaves.iter().map(|leaf| tensor.placement(leaf).logical().numel()).collect();
            // Other parameters are not the same in the stages that have a copy.
            let of_unit = if options.units.is_tied(&name) { &mut vec![0; loads.len()] } else { &mut loads };
            let mut owned: Vec<_> = owners(&sizes, of_unit).into_iter().zip(std::mem::take(&mut leaves)).collect();
            owned.sort_by_key(|(owner, _)| *owner);
            let owners: Vec<usize>;
            (owners, leaves) = owned.into_iter().unzip();
            owners
        });
        let how = options.of_unit(dtype, elements[&name]);
        let cut = owners.iter().flatten().zip(&leaves).map(|(owner, leaf)| {
            let needs_whole = !may_cut(optimizer, [leaf]);
            let placed = tensor.placed(leaf).filter(|_| needs_whole);
            placed.map_or(Ok(None), |placed| {
                require_some_everywhere(leaf, &placed)?;
                Ok(CutParam::balanced(&placed, &mut work[*owner]))
            })
        });
        let cut = cut.collect::<Result<Vec<_>>>()?;
        Unit::new(
            groups,
            how,
            name,
            UnitParameters { leaves, owners, cut },
            trained.then_some((optimizer, options.state)),
        )
    };
    parts.into_iter().map(unit).collect()
}

/// An error if a rank along tensor has nothing of a parameter that its rule needs whole: it would not know of it.
/// Frozen ones count, since they may be trained later.
fn require_some_everywhere<R: Runtime>(leaf: &Leaf<R>, placed: &Placed<R>) -> Result<()> {
    let Some(rank) = placed.placements().iter().position(|piece| piece.local().numel() == 0) else { return Ok(()) };
    let why = format!(
        "has no elements on rank {rank} of those that it is cut over, and ZeRO would update it by a rule that needs it whole: give it an \
         elementwise rule (`ParamGroups::others`), or leave it whole in the plan"
    );
    Err(Error::state(&*leaf.name(), why))
}

/// Tells whether the optimizer allows a cut through each of these parameters; it refuses some only if they are trained.
pub(super) fn may_cut<'l, R: Runtime>(
    optimizer: &dyn Shards<R>,
    leaves: impl IntoIterator<Item = &'l Arc<Leaf<R>>>,
) -> bool {
    leaves.into_iter().all(|leaf| optimizer.may_cut(&leaf.name(), &leaf.spec()).unwrap_or(false))
}
