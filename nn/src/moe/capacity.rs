//! The capacity of experts.

use numcore::{Result, Runtime};

use super::{TokenOrder, dispatch::unequal};
use crate::parallel::TensorGroup;

/// The limit of an expert's tokens: `⌈T · k / E · factor⌉` of `T` tokens that each pick `k` of `E` experts. Tokens
/// beyond it are dropped: the expert adds nothing to them. If a plan distributes experts, tokens of all ranks compete
/// in rank order.
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

    /// Computes, for each expert, the number of this rank's choices that stay. Choices of all ranks compete:
    /// `picked[rank][expert]` of them.
    /// `weights[choice]` is the routing weight of this rank's choice.
    pub(super) fn limits_among<R: Runtime>(
        self,
        order: &TokenOrder,
        weights: &[f64],
        top_k: usize,
        picked: &[Vec<usize>],
        (group, of): (&dyn TensorGroup<R>, &str),
    ) -> Result<Vec<usize>> {
        let (experts, here) = (order.picked().len(), group.rank());
        let limit = self.limit(picked.iter().flatten().sum::<usize>() / top_k, top_k, experts);
        let among = |ranks: &[Vec<usize>], expert: usize| ranks.iter().map(|of| of[expert]).sum::<usize>();
        if self.drop == DropBy::Position {
            return Ok((0..experts).map(|expert| limit.saturating_sub(among(&picked[..here], expert))).collect());
        }
        let full: Vec<usize> = (0..experts).filter(|&expert| among(picked, expert) > limit).collect();
        let mut limits = vec![limit; experts];
        if full.is_empty() {
            return Ok(limits);
        }
        let own: Vec<u8> = full.iter().flat_map(|&e| order.weights_of(e, weights)).flat_map(f64::to_le_bytes).collect();
        let all = group.exchange_bytes(&own, of)?;
        let mut rest: Vec<&[[u8; 8]]> = all.iter().map(|bytes| bytes.as_chunks().0).collect();
        for expert in full {
            let mut ranked = Vec::new();
            for (rank, rest) in rest.iter_mut().enumerate() {
                let (there, due) = (rest.len(), picked[rank][expert]);
                let own = rest.split_off(..due).ok_or_else(|| unequal(of, rank, there, due))?;
                ranked.extend(own.iter().map(|&weight| (f64::from_le_bytes(weight), rank)));
            }
            // Stable: of equal weights the first stays.
            ranked.sort_by(|(a, _), (b, _)| b.total_cmp(a));
            limits[expert] = ranked.iter().take(limit).filter(|(_, rank)| *rank == here).count();
        }
        Ok(limits)
    }
}
