//! Whether all ranks still have the same model.

use distributed::comm::{Collectives, Communicator};
use nn::{Module, ModuleExt};
use numcore::{Error, ErrorKind, Result, Runtime, Tensor};

use crate::{Callback, Event, Interval, Run};

/// Compares the model of all ranks every so often, to the bit: one pass over memory, and an exchange of a few bytes for each parameter. Where it
/// differs, the run ends with an error that names the first parameter, or buffer if they are looked at, and the ranks.
///
/// For models that every rank has whole: data parallelism, and ZeRO whose stage leaves parameters whole. With sharded parameters each comparison gathers
/// them.
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

    /// Names, and for each a hash of the value.
    fn hashes<R: Runtime>(&self, model: &(impl Module<R> + ?Sized)) -> Result<Vec<(String, u64)>> {
        let parameters = model.named_parameters().into_iter().map(|(name, p)| Ok((name, hash(&p.value()?)?)));
        let mut all = parameters.collect::<Result<Vec<_>>>()?;
        if self.buffers {
            for (name, buffer) in model.named_buffers() {
                all.push((name, hash(&buffer.value())?));
            }
        }
        Ok(all)
    }
}

/// A hash of the value's bytes, equal on every rank and every build. It takes eight bytes at a time, where
/// [`Fnv1a`](numcore::Fnv1a) takes one: whole models are hashed.
fn hash<R: Runtime>(value: &Tensor<R>) -> Result<u64> {
    let bytes = value.to_bytes()?;
    let (words, rest) = bytes.as_chunks::<8>();
    let step = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    let hash = words.iter().fold(0xcbf2_9ce4_8422_2325, |hash, word| step(hash, u64::from_le_bytes(*word)));
    Ok(rest.iter().fold(hash, |hash, byte| step(hash, u64::from(*byte))))
}

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for EqualWeights {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        if !matches!(event, Event::StepEnd(_)) || run.comm().size() == 1 || !run.is_due(&self.every) {
            return Ok(());
        }
        let own = self.hashes(run.model())?;
        let bytes: Vec<u8> = own.iter().flat_map(|(_, hash)| hash.to_le_bytes()).collect();
        let all = run.comm().exchange(&bytes)?;
        let Some(k) = (0..own.len()).find(|k| all.iter().any(|other| at(other, *k) != at(&all[0], *k))) else {
            return Ok(());
        };
        let members = run.comm().members();
        let others = (0..all.len()).filter(|r| at(&all[*r], k) != at(&all[0], k)).map(|r| members[r].to_string());
        let why = format!(
            "after step {} `{}` is not on rank {} what it is on rank {}, and nothing before it in the model differs: look for what \
             changes it outside of the optimizer, or draws random values that differ between ranks",
            run.progress().step,
            own[k].0,
            others.collect::<Vec<_>>().join(", "),
            members[0],
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

/// The `k`-th hash of a rank.
fn at(hashes: &[u8], k: usize) -> Option<&[u8]> {
    hashes.get(8 * k..8 * k + 8)
}
