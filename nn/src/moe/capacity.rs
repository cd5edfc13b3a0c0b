//! The capacity of experts.

use numcore::{Result, Runtime};

use super::{TokenOrder, dispatch::unequal};
use crate::parallel::TensorGroup;

/// The limit of an expert's tokens: `⌈T · k / E · factor⌉` of `T` tokens that each pick `k` of `E` experts. Tokens
/// beyond it are dropped: the expert adds nothing to them. If a plan distributes experts, tokens of all ranks compete
/// in rank order. Those of sequences that are cut over ranks compete in the order of whole sequences.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// The limit as a multiple of an equal share; 1 or a little above.
    pub factor: f64,
    /// The order in which tokens are dropped.
    pub drop: DropBy,
}

/// The rule that selects the tokens beyond a [`Capacity`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DropBy {
    /// The last ones in the batch.
    Position,
    /// The ones that weigh the expert least; of equal ones the last.
    Weight,
}

impl Capacity {
    /// The limit for `tokens` tokens.
    pub fn limit(self, tokens: usize, top_k: usize, experts: usize) -> usize {
        // An exact product first: a factor of 1 gives the equal share itself.
        ((tokens * top_k) as f64 * self.factor / experts.max(1) as f64).ceil() as usize
    }

    /// Computes, for each expert, the number of this rank's choices that stay. Choices of all ranks compete.
    pub(super) fn limits_among<R: Runtime>(
        self,
        order: &TokenOrder,
        Competing { weights, places, picked }: Competing<'_>,
        top_k: usize,
        (group, of): (&dyn TensorGroup<R>, &str),
    ) -> Result<Vec<usize>> {
        let (experts, here) = (order.picked().len(), group.rank());
        let limit = self.limit(picked.iter().flatten().sum::<usize>() / top_k, top_k, experts);
        let among = |ranks: &[Vec<usize>], expert: usize| ranks.iter().map(|of| of[expert]).sum::<usize>();
        if self.drop == DropBy::Position && places.is_none() {
            return Ok((0..experts).map(|expert| limit.saturating_sub(among(&picked[..here], expert))).collect());
        }
        let full: Vec<usize> = (0..experts).filter(|&expert| among(picked, expert) > limit).collect();
        let mut limits = vec![limit; experts];
        if full.is_empty() {
            return Ok(limits);
        }
        let choice = |choice: usize| {
            let (weight, token) = (weights.get(choice).copied().unwrap_or(0.0), choice / top_k);
            let place = places.map_or(token, |all| all.places[token]);
            [weight.to_le_bytes(), (place as u64).to_le_bytes()].concat()
        };
        let own: Vec<u8> = full.iter().flat_map(|&expert| order.choices_of(expert)).flat_map(choice).collect();
        let all = group.exchange_bytes(&own, of)?;
        let mut rest: Vec<&[[u8; 16]]> = all.iter().map(|bytes| bytes.as_chunks().0).collect();
        // Ranks that have parts of the same sequences follow one another.
        let parts = places.map_or(1, |all| all.ranks);
        for expert in full {
            let mut ranked = Vec::new();
            for (rank, rest) in rest.iter_mut().enumerate() {
                let (there, due) = (rest.len(), picked[rank][expert]);
                let own = rest.split_off(..due).ok_or_else(|| unequal(of, rank, there, due))?;
                ranked.extend(own.iter().map(|choice| {
                    let (weight, place) = choice.split_at(8);
                    let word = |bytes: &[u8]| bytes.try_into().unwrap_or_default();
                    (f64::from_le_bytes(word(weight)), (rank / parts, u64::from_le_bytes(word(place))), rank)
                }));
            }
            // Of equal weights, and without weights, the first stays.
            ranked.sort_by(|(a, at, _), (b, other, _)| b.total_cmp(a).then(at.cmp(other)));
            limits[expert] = ranked.iter().take(limit).filter(|(.., rank)| *rank == here).count();
        }
        Ok(limits)
    }
}

/// The choices of all ranks that compete for places in experts.
#[derive(Clone, Copy)]
pub(super) struct Competing<'a> {
    /// The routing weight of each of this rank's choices; none if they do not count.
    pub(super) weights: &'a [f64],
    /// The places of this rank's tokens, if they are no tokens one after another.
    pub(super) places: Option<&'a TokenPlaces>,
    /// `picked[rank][expert]` choices.
    pub(super) picked: &'a [Vec<usize>],
}

/// The places of a rank's tokens among those of the ranks that have parts of the same sequences.
pub(super) struct TokenPlaces {
    /// The number of these ranks.
    pub(super) ranks: usize,
    /// The place of each token of this rank, ascending.
    pub(super) places: Vec<usize>,
}
