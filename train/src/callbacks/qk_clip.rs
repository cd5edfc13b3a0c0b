//! QK-clip: bounds of attention scores by the weights of queries and keys.

use std::{collections::BTreeMap, hash::Hasher, ops::Range};

use distributed::comm::{Collectives, Comm};
use nn::{Module, ModuleEntry, Param, parallel::ContextSlot, walk};
use numcore::{DType, Error, Fnv1a, Result, Runtime, Shape, Tensor, ops::PointwiseOps};

use crate::{Callback, Event, Run};

/// Bounds attention scores: after each step, heads whose largest score `s` exceeded the threshold `τ` have their scores
/// multiplied by `τ/s` from then on. With the rule [`Muon`](optim::Muon), whose updates let scores grow without bound,
/// this is MuonClip.
///
/// Rows of the projections of queries and of keys are multiplied by `√(τ/s)`, and their biases. Where heads of queries
/// share one of keys, those of queries alone are multiplied by `τ/s`. Scores are the scaled products of queries and
/// keys of all pairs of tokens of a sequence, in passes that record gradients. Each such pass multiplies queries and
/// keys twice. Rows that fill up a batch count too. Ranks exchange the largest scores at each step, so all
/// weights change alike; pipelines, ZeRO and tensor axes cut by heads change nothing.
///
/// Half-precision weights are rounded, so factors nearer to 1 than their precision change nothing.
///
/// The largest score of all heads is recorded as `attention/largest_score`.
///
/// Kimi Team, *Kimi K2: Open Agentic Intelligence*, 2025, algorithm 1.
///
/// ```
/// # use train::QkClip;
/// let clip = QkClip::at(100.0)?;
/// # Ok::<(), numcore::Error>(())
/// ```
///
/// # Errors
/// A run ends with an error that names the layer if its heads are normalized, or a projection is frozen or has an
/// adapter. The same holds for projections of unknown names, and for sequences that are cut over ranks.
#[doc(alias("MuonClip", "qk_clip"))]
#[derive(Clone, Debug)]
pub struct QkClip {
    threshold: f64,
}

impl QkClip {
    /// Bounds scores by a threshold above 0; 100 is the paper's.
    ///
    /// # Errors
    /// An error if the threshold is not a positive number.
    pub fn at(threshold: f64) -> Result<Self> {
        if threshold.is_finite() && threshold > 0.0 {
            return Ok(QkClip { threshold });
        }
        Err(Error::range("QkClip", "threshold", threshold, "a positive number"))
    }

    /// Scales down heads of the model by the scores that all ranks observed since the last call. Returns the largest of
    /// them; none without a pass since then. Loops of one's own call it after each update, on all ranks.
    ///
    /// The first call starts to observe.
    pub fn apply<R: Runtime>(&self, comm: &Comm<R>, model: &(impl Module<R> + ?Sized)) -> Result<Option<f64>> {
        self.apply_to(comm, &ScoredLayer::all(model))
    }

    fn apply_to<R: Runtime>(&self, comm: &Comm<R>, layers: &[ScoredLayer<R>]) -> Result<Option<f64>> {
        // A rank that fails takes part in the exchange, so that no other waits for it.
        let ids = layers.iter().map(ScoredLayer::id).collect::<Result<Vec<u64>>>();
        let own = ids.and_then(|ids| {
            let own = layers.iter().zip(&ids).map(|(layer, id)| layer.observed(*id)).collect::<Result<Vec<_>>>()?;
            Ok((ids, own.concat()))
        });
        let bytes = own.iter().flat_map(|(_, scores)| scores).flat_map(|score| score.to_bytes());
        let all = comm.exchange(&std::iter::once(u8::from(own.is_ok())).chain(bytes).collect::<Vec<u8>>())?;
        let (ids, _) = own?;
        if let Some(rank) = all.iter().position(|bytes| bytes.first() != Some(&1)) {
            let why = format!("rank {} could not observe its scores; its own error says why", comm.members()[rank]);
            return Err(Error::usage("QkClip", why));
        }
        let mut largest = BTreeMap::<u64, BTreeMap<u64, f64>>::new();
        for scores in all.iter().flat_map(|bytes| HeadScore::all_of(&bytes[1..])) {
            let heads = largest.entry(scores.layer).or_default();
            let one = heads.entry(scores.head).or_insert(f64::NEG_INFINITY);
            *one = one.max(scores.largest);
        }
        for (layer, id) in layers.iter().zip(ids) {
            // Scores below 0, and those that are no numbers, are no reason to change weights.
            let factor = |score: &f64| if *score > self.threshold { self.threshold / score } else { 1.0 };
            let factors: Vec<f64> = largest.get(&id).into_iter().flat_map(|heads| heads.values().map(factor)).collect();
            layer.scale(&factors)?;
        }
        Ok(largest.into_values().flat_map(BTreeMap::into_values).reduce(f64::max))
    }
}

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for QkClip {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Begin => of_run(run).iter().for_each(|layer| layer.slot.observe_scores()),
            Event::StepEnd(_) => {
                if let Some(largest) = self.apply_to(run.comm(), &of_run(run))? {
                    run.record("attention/largest_score", largest);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The layers of the model, and of the modules that the training step holds itself.
fn of_run<R: Runtime, M: Module<R>, B>(run: &Run<'_, R, M, B>) -> Vec<ScoredLayer<R>> {
    run.modules().into_iter().flat_map(ScoredLayer::all).collect()
}

/// The largest score of a head of a layer, or of a rank's part of one.
#[derive(Clone, Copy)]
struct HeadScore {
    layer: u64,
    head: u64,
    largest: f64,
}

impl HeadScore {
    fn to_bytes(self) -> [u8; 24] {
        let words = [self.layer, self.head, self.largest.to_bits()].map(u64::to_le_bytes);
        std::array::from_fn(|i| words[i / 8][i % 8])
    }

    fn all_of(bytes: &[u8]) -> impl Iterator<Item = HeadScore> {
        let words = bytes.as_chunks::<8>().0.as_chunks::<3>().0.iter();
        words.map(|words| words.map(u64::from_le_bytes)).map(|[layer, head, largest]| HeadScore {
            layer,
            head,
            largest: f64::from_bits(largest),
        })
    }
}

/// An attention layer, and its parameters by their names in it.
struct ScoredLayer<R: Runtime> {
    name: String,
    slot: ContextSlot<R>,
    parameters: Vec<(String, Param<R>)>,
    /// The names in it of linear layers with an adapter.
    adapted: Vec<String>,
}

/// The rows of a parameter that give the heads of queries, or of keys.
struct HeadRows<R: Runtime> {
    parameter: Param<R>,
    rows: Range<usize>,
}

/// The names of a layer that projects to queries, keys and values at once.
const JOINT: [&str; 3] = ["qkv.", "qkv_proj.", "in_proj_"];
/// The names of layers that project to queries and to keys.
const SEPARATE: [[&str; 2]; 2] = [["q_proj.", "k_proj."], ["query.", "key."]];

impl<R: Runtime> ScoredLayer<R> {
    fn all(model: &(impl Module<R> + ?Sized)) -> Vec<Self> {
        let (mut layers, mut parameters, mut adapted) = (Vec::new(), Vec::new(), Vec::new());
        walk(model, |name, entry| match entry {
            ModuleEntry::Context(slot) if slot.is_attention() => layers.push((name.to_string(), slot.clone())),
            ModuleEntry::Parameter(parameter) => parameters.push((name.to_string(), parameter.clone())),
            ModuleEntry::Adapter(slot) if slot.get().is_some() => adapted.push(name.to_string()),
            _ => {}
        });
        let complete = |(name, slot): (String, ContextSlot<R>)| {
            let inside = |full: &str| match full.strip_prefix(&name)? {
                rest if name.is_empty() => Some(rest.to_string()),
                rest => rest.strip_prefix('.').map(str::to_owned),
            };
            let own = parameters.iter().filter_map(|(full, p)| Some((inside(full)?, p.clone()))).collect();
            ScoredLayer {
                adapted: adapted.iter().filter_map(|full| inside(full)).collect(),
                parameters: own,
                name,
                slot,
            }
        };
        layers.into_iter().map(complete).collect()
    }

    /// A number of the layer, and of this rank's heads of it, that is equal on all ranks that have them.
    fn id(&self) -> Result<u64> {
        let mut id = Fnv1a::new();
        id.write(self.name.as_bytes());
        let [queries, _] = self.projections()?;
        if let Some(placed) = queries.first().and_then(|own| own.parameter.placed()).filter(|placed| !placed.is_whole())
        {
            id.write(format!("{:?}", placed.placement()).as_bytes());
        }
        Ok(id.finish())
    }

    /// The largest score of each head since the last call.
    fn observed(&self, id: u64) -> Result<Vec<HeadScore>> {
        self.slot.observe_scores();
        let Some(scores) = self.slot.take_largest_scores() else { return Ok(Vec::new()) };
        let of = |(head, largest): (usize, f64)| HeadScore { layer: id, head: head as u64, largest };
        Ok(scores.to_f64s()?.into_iter().enumerate().map(of).collect())
    }

    /// Multiplies the scores of heads by factors.
    fn scale(&self, factors: &[f64]) -> Result<()> {
        if factors.iter().all(|&x| x == 1.0) {
            return Ok(());
        }
        let [queries, keys] = self.projections()?;
        let roots: Vec<f64> = factors.iter().map(|x| x.sqrt()).collect();
        // Of all ranks: some may have a head of keys each, which is one for all of them.
        let heads = |rows: &[HeadRows<R>]| rows.first().map(|own| own.parameter.logical_shape()[0]);
        if heads(&queries) != heads(&keys) {
            return queries.iter().try_for_each(|own| own.multiply(factors));
        }
        queries.iter().chain(&keys).try_for_each(|own| own.multiply(&roots))
    }

    /// The rows of queries and of keys: of a weight, and of a bias if there is one.
    fn projections(&self) -> Result<[Vec<HeadRows<R>>; 2]> {
        let of = |prefix: &str, part: usize, parts: usize| -> Vec<HeadRows<R>> {
            let own =
                self.parameters.iter().filter(|(name, _)| name.strip_prefix(prefix).is_some_and(|n| !n.contains('.')));
            let rows = |(_, parameter): &(String, Param<R>)| {
                let n = parameter.shape().dims().first().map_or(0, |rows| rows / parts);
                HeadRows { parameter: parameter.clone(), rows: part * n..(part + 1) * n }
            };
            own.map(rows).collect()
        };
        let joint = JOINT.into_iter().map(|name| (vec![name], [of(name, 0, 3), of(name, 1, 3)]));
        let separate = SEPARATE.into_iter().map(|[q, k]| (vec![q, k], [of(q, 0, 1), of(k, 0, 1)]));
        let Some((names, found)) = joint.chain(separate).find(|(_, rows)| rows.iter().all(|rows| !rows.is_empty()))
        else {
            return Err(self.cannot("its projections have none of the names `qkv`, `in_proj`, `q_proj`, `query`"));
        };
        if self.parameters.iter().any(|(name, _)| name.starts_with("q_norm.") || name.starts_with("k_norm.")) {
            return Err(self.cannot("it normalizes heads, which bounds their scores: leave the callback out"));
        }
        if self.adapted.iter().any(|own| names.iter().any(|name| name.trim_end_matches('.') == own)) {
            return Err(self.cannot("a projection has an adapter, whose product is added to its own"));
        }
        if found.iter().flatten().any(|own| !own.parameter.requires_grad()) {
            return Err(self.cannot("a projection is frozen"));
        }
        Ok(found)
    }

    fn cannot(&self, why: &str) -> Error {
        Error::usage("QkClip", format!("the scores of `{}` cannot be scaled: {why}", self.name))
    }
}

impl<R: Runtime> HeadRows<R> {
    /// Multiplies the rows of each head by its factor. Half-precision values are rounded once.
    fn multiply(&self, factors: &[f64]) -> Result<()> {
        let (shape, dtype, width) = (self.parameter.shape(), self.parameter.dtype(), self.rows.len() / factors.len());
        if width * factors.len() != self.rows.len() {
            let why = format!("{} rows are not those of {} heads", self.rows.len(), factors.len());
            return Err(Error::shape("QkClip", &[shape], why));
        }
        let mut rows = vec![1.0; shape[0]];
        rows[self.rows.clone()].iter_mut().enumerate().for_each(|(i, row)| *row = factors[i / width]);
        let column: Vec<usize> = (0..shape.rank()).map(|axis| if axis == 0 { shape[0] } else { 1 }).collect();
        let wide = if dtype.is_half() { DType::F32 } else { dtype };
        let value = self.parameter.value()?;
        let rows = Tensor::from_slice(value.runtime(), Shape::new(&column)?, &rows)?.to_dtype(wide)?;
        self.parameter.set(value.to_dtype(wide)?.mul(&rows)?.to_dtype(dtype)?)
    }
}
