//! Comparison of the model between ranks.

use distributed::comm::{Collectives, Communicator};
use nn::{Module, ModuleExt};
use numcore::{Error, ErrorKind, Result, Runtime};

use crate::{Callback, Event, Interval, Run, hash::hash_of};

/// Compares the model of all ranks at an interval, to the bit. It takes one pass over memory, and an exchange of a few
/// bytes for each parameter. A difference ends the run with an error that names the first parameter, or buffer if
/// buffers are compared, and the ranks.
///
/// Ranks are compared that have the same piece of a parameter: all of them, unless the model is cut over a tensor axis.
/// With ZeRO whose stage shards parameters each comparison gathers them.
#[derive(Clone, Debug)]
pub struct EqualWeights {
    every: Interval,
    buffers: bool,
}

impl EqualWeights {
    /// Compares parameters at this interval.
    pub fn every(interval: Interval) -> Self {
        EqualWeights { every: interval, buffers: false }
    }

    /// Compares buffers as well: for models whose ranks [share them](distributed::train::BufferSync).
    pub fn with_buffers(mut self) -> Self {
        self.buffers = true;
        self
    }

    /// The hashes of this rank's parameters and buffers, in the model's order.
    fn hashes<R: Runtime>(&self, model: &(impl Module<R> + ?Sized)) -> Result<Vec<HashedValue>> {
        let parameters = model.named_parameters().into_iter().map(|(name, p)| {
            let placed = p.placed().filter(|placed| !placed.placement().is_whole());
            let piece = placed.map_or(0, |placed| hash_of(format!("{:?}", placed.placement()).as_bytes()));
            Ok(HashedValue { name, piece, value: hash_of(&p.value()?.to_bytes()?) })
        });
        let mut all = parameters.collect::<Result<Vec<_>>>()?;
        if self.buffers {
            for (name, buffer) in model.named_buffers() {
                all.push(HashedValue { name, piece: 0, value: hash_of(&buffer.value().to_bytes()?) });
            }
        }
        Ok(all)
    }
}

/// A parameter or buffer in two hashes: this rank's piece of it, 0 for all of it, and the value.
struct HashedValue {
    name: String,
    piece: u64,
    value: u64,
}

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for EqualWeights {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if !matches!(event, Event::StepEnd(_)) || run.comm().size() == 1 || !run.is_due(&self.every) {
            return Ok(());
        }
        let own = self.hashes(run.model())?;
        let bytes: Vec<u8> = own.iter().flat_map(|v| [v.piece.to_le_bytes(), v.value.to_le_bytes()].concat()).collect();
        let all: Vec<Vec<[u64; 2]>> = run.comm().exchange(&bytes)?.iter().map(|bytes| read(bytes)).collect();
        let Some((k, first)) = (0..own.len()).find_map(|k| Some((k, *differing(&all, k).first()?))) else {
            return Ok(());
        };
        let members = run.comm().members();
        let others = differing(&all, k).into_iter().filter(|pair| pair.0 == first.0);
        let why = format!(
            "after step {} `{}` differs between rank {} and rank {}, and is the first in the model that does: look for code that \
             changes it outside of the optimizer, or draws random values that differ between ranks",
            run.progress().step,
            own[k].name,
            others.map(|(_, rank)| members[rank].to_string()).collect::<Vec<_>>().join(", "),
            members[first.0],
        );
        Err(Error::from(ErrorKind::Mismatch { op: "EqualWeights", why }).on_rank(run.comm().world_rank()))
    }

    fn counts_tokens(&self) -> bool {
        self.every.counts_tokens()
    }

    fn check(&self) -> Result<()> {
        self.every.check("EqualWeights")
    }
}

/// Reads a rank's message: piece and hash of each value.
fn read(bytes: &[u8]) -> Vec<[u64; 2]> {
    let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    words.as_chunks().0.to_vec()
}

/// Pairs of the first rank with a piece and a rank whose `k`-th value of that piece differs.
fn differing(all: &[Vec<[u64; 2]>], k: usize) -> Vec<(usize, usize)> {
    let of = |rank: usize| all[rank].get(k).copied();
    let piece = |rank: usize| of(rank).map(|[piece, _]| piece);
    let first = |rank: usize| (0..rank).find(|&other| piece(other) == piece(rank));
    (0..all.len()).filter_map(|rank| Some((first(rank)?, rank))).filter(|&(a, b)| of(a) != of(b)).collect()
}
