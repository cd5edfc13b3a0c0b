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
/// keys of all pairs of tokens of a sequence, in passes that record gradients. To compute them, each such pass multiplies
/// queries and keys twice. Ranks exchange the largest scores at each step, so all weights change alike; pipelines, ZeRO
/// and tensor axes cut by heads change nothing.
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
/// A run ends with an error that names the layer if heads are normalized, if a projection is frozen or has an adapter,
/// and if sequences are cut over ranks.
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

    /// Scales down heads of the model by scores that were observed on all ranks since the last call, and returns the
    /// largest of them; none without a pass since then. Loops of one's own call it after each update, on all ranks.
    ///
    /// The first call starts to observe.
    pub fn apply<R: Runtime>(&self, comm: &Comm<R>, model: &(impl Module<R> + ?Sized)) -> Result<Option<f64>> {
        let layers = ScoredLayer::all(model);
        let own = layers.iter().map(ScoredLayer::observed).collect::<Result<Vec<_>>>()?;
        let bytes: Vec<u8> = own.iter().flatten().flat_map(HeadScores::to_bytes).collect();
        let mut largest = BTreeMap::<(u64, u64), f64>::new();
        for scores in comm.exchange(&bytes)?.iter().flat_map(|rank| HeadScores::all_of(rank)) {
            let one = largest.entry((scores.layer, scores.head)).or_insert(f64::NEG_INFINITY);
            *one = one.max(scores.largest);
        }
        for (layer, own) in layers.iter().zip(&own) {
            let of_head = |own: &HeadScores| largest.get(&(own.layer, own.head)).map_or(1.0, |s| self.threshold / s);
            // Scores below 0, and those that are no numbers, are no reason to change weights.
            let factor = |x: f64| if x > 0.0 && x < 1.0 { x } else { 1.0 };
            layer.scale(&own.iter().map(|own| factor(of_head(own))).collect::<Vec<f64>>())?;
        }
        Ok(largest.into_values().reduce(f64::max))
    }
}

impl<R: Runtime, M: Module<R>, B> Callback<R, M, B> for QkClip {
    fn on(&mut self, event: &Event<'_, R>, run: &mut Run<'_, R, M, B>) -> Result<()> {
        match event {
            Event::Begin => ScoredLayer::all(run.model()).iter().for_each(|layer| layer.slot.observe_scores()),
            Event::StepEnd(_) => {
                if let Some(largest) = self.apply(run.comm(), run.model())? {
                    run.record("attention/largest_score", largest);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The largest score of a head of a layer, or of a rank's part of one.
struct HeadScores {
    layer: u64,
    head: u64,
    largest: f64,
}

impl HeadScores {
    fn to_bytes(&self) -> [u8; 24] {
        let words = [self.layer, self.head, self.largest.to_bits()].map(u64::to_le_bytes);
        std::array::from_fn(|i| words[i / 8][i % 8])
    }

    fn all_of(bytes: &[u8]) -> impl Iterator<Item = HeadScores> {
        let words = bytes.as_chunks::<8>().0.as_chunks::<3>().0.iter();
        words.map(|words| words.map(u64::from_le_bytes)).map(|[layer, head, largest]| HeadScores {
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

    /// The largest score of each head since the last call.
    fn observed(&self) -> Result<Vec<HeadScores>> {
        self.slot.observe_scores();
        let Some(scores) = self.slot.take_largest_scores() else { return Ok(Vec::new()) };
        let mut layer = Fnv1a::new();
        layer.write(self.name.as_bytes());
        let [queries, _] = self.projections()?;
        if let Some(placed) = queries.first().and_then(|own| own.parameter.placed()).filter(|placed| !placed.is_whole())
        {
            layer.write(format!("{:?}", placed.placement()).as_bytes());
        }
        let of = |(head, largest): (usize, f64)| HeadScores { layer: layer.finish(), head: head as u64, largest };
        Ok(scores.to_f64s()?.into_iter().enumerate().map(of).collect())
    }

    /// Multiplies the scores of heads by factors.
    fn scale(&self, factors: &[f64]) -> Result<()> {
        if factors.iter().all(|&x| x == 1.0) {
            return Ok(());
        }
        let [queries, keys] = self.projections()?;
        let roots: Vec<f64> = factors.iter().map(|x| x.sqrt()).collect();
        let count = |rows: &[HeadRows<R>]| rows.first().map(|own| own.rows.len());
        if count(&queries) != count(&keys) {
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
