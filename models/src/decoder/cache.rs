//! The cache of keys and values: those of tokens that the decoder has read.

use autograd::{Var, is_grad_enabled};
use numcore::{
    Error, Result, Runtime, Shape, Tensor, TensorMut,
    ops::{Apply, Op, ViewOp, ViewOps},
};

/// The keys and values of a batch in every layer, `2 · L · G · D` elements a token, so that the next token costs one
/// token's work.
///
/// Memory grows with the tokens that are read; in layers with a sliding window, to about twice the window. Rows of a
/// batch end together: shorter prompts are padded on the left. A call that fails adds no token and can be repeated. If
/// it failed while it wrote the cache, later calls return an error.
pub struct KvCache<R: Runtime> {
    layers: Vec<LayerCache<R>>,
    padding: Vec<usize>,
    /// True for rows whose text has ended: tokens read for them after that do not matter.
    ended: Vec<bool>,
    capacity: usize,
    len: usize,
}

/// Keys and values of one layer, `[B, G, S, D]` with room for `S` tokens.
pub(crate) struct LayerCache<R: Runtime> {
    memory: Option<[Tensor<R>; 2]>,
    capacity: usize,
    /// The number of tokens that a query sees, its own among them; all if `None`.
    window: Option<usize>,
    /// The number of tokens dropped at the beginning, which no query sees any more.
    dropped: usize,
    /// The number of tokens of calls that went through.
    len: usize,
    /// The end of the written memory, in tokens: further than `len` after a call that failed.
    written: usize,
}

/// The number of tokens that memory has room for at first.
const LEAST: usize = 64;

impl<R: Runtime> KvCache<R> {
    /// An empty cache for up to `capacity` tokens of each row, padding among them. `padding` has one entry for each
    /// row: its number of padding tokens at the beginning.
    pub fn new(layers: usize, capacity: usize, padding: Vec<usize>) -> Self {
        Self::with_windows(vec![None; layers], capacity, padding)
    }

    /// An empty cache for layers with these sliding windows; see [`new`](KvCache::new).
    pub(super) fn with_windows(windows: Vec<Option<usize>>, capacity: usize, padding: Vec<usize>) -> Self {
        let empty = |window| LayerCache { memory: None, capacity, window, dropped: 0, len: 0, written: 0 };
        let ended = vec![false; padding.len()];
        KvCache { layers: windows.into_iter().map(empty).collect(), padding, ended, capacity, len: 0 }
    }

    /// The number of tokens of each row that the cache holds, padding among them.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tells whether no token was read yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of padding tokens at the beginning of each row.
    pub fn padding(&self) -> &[usize] {
        &self.padding
    }

    /// Tells whether rows have no padding, and layers no windows.
    pub(crate) fn is_plain(&self) -> bool {
        self.padding.iter().all(|&padding| padding == 0) && self.layers.iter().all(|layer| layer.window.is_none())
    }

    /// Marks a row's text as ended. Its later tokens have position 0, so that none is past the context.
    pub(crate) fn end(&mut self, row: usize) {
        self.ended[row] = true;
    }

    /// The number that is subtracted from each row's columns to get positions. For rows that ended it is `end`, past
    /// all columns.
    pub(super) fn shifts(&self, end: usize) -> impl Iterator<Item = usize> {
        self.padding.iter().zip(&self.ended).map(move |(&padding, &ended)| if ended { end } else { padding })
    }

    /// The first row that holds at most `most` tokens of a text, and would hold more with `tokens` more.
    pub(super) fn passes(&self, most: usize, tokens: usize) -> Option<usize> {
        let held = self.shifts(self.len).map(|shift| self.len.saturating_sub(shift));
        held.enumerate().find(|(_, held)| (1..=most).contains(held) && held + tokens > most).map(|(row, _)| row)
    }

    /// A cache of some rows of others, in this order, with room for `capacity` tokens of each. Rows end together in it,
    /// and it begins with the longest: what none of them has is dropped.
    pub(crate) fn of_rows(rows: &[(&KvCache<R>, usize)], capacity: usize) -> Result<Self> {
        let own = |&(cache, row): &(&KvCache<R>, usize)| cache.len - cache.padding[row];
        let len = rows.iter().map(own).max().unwrap_or(0);
        let layers = rows.first().map_or(0, |(cache, _)| cache.layers.len());
        let layers = (0..layers).map(|i| {
            let rows: Vec<_> = rows.iter().map(|of| (&of.0.layers[i], of.1, own(of))).collect();
            LayerCache::of_rows(&rows, len, capacity)
        });
        Ok(KvCache {
            layers: layers.collect::<Result<_>>()?,
            padding: rows.iter().map(|of| len - own(of)).collect(),
            ended: rows.iter().map(|(cache, row)| cache.ended[*row]).collect(),
            capacity,
            len,
        })
    }

    pub(crate) fn layer(&mut self, i: usize) -> &mut LayerCache<R> {
        &mut self.layers[i]
    }

    pub(crate) fn advance(&mut self, tokens: usize) {
        self.len += tokens;
        self.layers.iter_mut().for_each(|layer| layer.len = self.len);
    }

    /// Checks that this model's cache has room for `tokens` more tokens in each of `rows` rows.
    pub(crate) fn check(&self, rows: usize, tokens: usize, layers: usize) -> Result<()> {
        let wrong = |name, value: usize, allowed| Err(Error::range("KvCache", name, value, allowed));
        if layers != self.layers.len() {
            return wrong("number of layers", layers, format!("{}, as the cache is for", self.layers.len()));
        }
        if is_grad_enabled() {
            return Err(Error::usage("KvCache", "no gradient flows through a cache: compute within `no_grad`"));
        }
        if rows != self.padding.len() {
            return wrong("number of rows", rows, format!("{}, as the cache is for", self.padding.len()));
        }
        if tokens > self.capacity - self.len {
            let (len, room) = (self.len, self.capacity);
            let allowed = format!("at most {}: the cache has room for {room} tokens and holds {len}", room - len);
            return wrong("number of tokens", tokens, allowed);
        }
        Ok(())
    }
}

impl<R: Runtime> LayerCache<R> {
    /// The layer of [`KvCache::of_rows`]: rows of layers with their own tokens, of which a window may keep the last.
    fn of_rows(rows: &[(&Self, usize, usize)], len: usize, capacity: usize) -> Result<Self> {
        let kept = |&(layer, _, own): &(&Self, usize, usize)| own.min(layer.len - layer.dropped);
        let most = rows.iter().map(kept).max().unwrap_or(0);
        let window = rows.first().and_then(|of| of.0.window);
        let mut new = LayerCache { memory: None, capacity, window, dropped: len - most, len, written: len };
        let Some(like) = rows.iter().find_map(|of| of.0.memory.as_ref()) else { return Ok(new) };
        let joined = |which: usize| {
            let (like, shape) = (&like[which], like[which].shape());
            let room = (most.max(1) * 2).max(LEAST).min(capacity.max(most));
            let mut to = TensorMut::zeros(like.runtime(), shape.with(0, rows.len()).with(2, room), like.dtype())?;
            for (i, of) in rows.iter().enumerate().filter(|(_, of)| kept(of) > 0) {
                let (Some(memory), kept) = (&of.0.memory, kept(of)) else { continue };
                let end = of.0.len - of.0.dropped;
                let from = memory[which].narrow(0, of.1, 1)?.narrow(2, end - kept, kept)?;
                let row = ViewOp::Slice { axis: 0, start: i, len: 1, step: 1 };
                let place = ViewOp::Slice { axis: 2, start: most - kept, len: kept, step: 1 };
                to.accumulate_view(&[row, place], &Op::identity(), &[&from])?;
            }
            to.freeze()
        };
        new.memory = Some([joined(0)?, joined(1)?]);
        Ok(new)
    }

    /// Adds keys and values `[B, G, T, D]`. Returns all that are kept now, `[B, G, S, D]`: those of the last `S`
    /// tokens.
    pub(crate) fn extend(&mut self, keys: &Var<R>, values: &Var<R>) -> Result<[Var<R>; 2]> {
        let new = [keys.value()?, values.value()?];
        let (kept, tokens) = (self.len - self.dropped, new[0].shape()[2]);
        let fits = |memory: &Tensor<R>| self.written == self.len && kept + tokens <= memory.shape()[2];
        let (kept, [k, v]) = match self.memory.take() {
            Some([k, v]) if fits(&k) => (kept, [k, v]),
            Some([k, v]) => {
                let seen = self.window.map_or(kept, |window| kept.min(window - 1));
                (seen, [self.moved(&k, kept, seen, tokens)?, self.moved(&v, kept, seen, tokens)?])
            }
            None if self.len == 0 => (0, [self.empty(&new[0], tokens)?, self.empty(&new[1], tokens)?]),
            None => return Err(Error::state("KvCache", "a call that failed lost what was read: begin a new cache")),
        };
        (self.written, self.dropped) = (self.len + tokens, self.len - kept);
        let memory = [added(k, kept, &new[0])?, added(v, kept, &new[1])?];
        let all = |x: &Tensor<R>| x.narrow(2, 0, kept + tokens).map(Var::new);
        let all = [all(&memory[0])?, all(&memory[1])?];
        self.memory = Some(memory);
        Ok(all)
    }

    /// Memory of zeros for `tokens` tokens or more: room for twice as many, at least 64, at most the capacity.
    fn empty(&self, like: &Tensor<R>, tokens: usize) -> Result<Tensor<R>> {
        let (shape, room) = (like.shape(), tokens.saturating_mul(2).max(LEAST).min(self.capacity));
        Tensor::zeros(like.runtime(), [shape[0], shape[1], room, shape[3]], like.dtype())
    }

    /// New memory with the last `seen` of the `kept` tokens, and room for `tokens` more.
    fn moved(&self, memory: &Tensor<R>, kept: usize, seen: usize, tokens: usize) -> Result<Tensor<R>> {
        let empty = self.empty(memory, seen + tokens)?;
        if seen == 0 { Ok(empty) } else { added(empty, 0, &memory.narrow(2, kept - seen, seen)?) }
    }
}

/// The memory with new rows from `start` on, written in place unless an earlier output still holds it.
fn added<R: Runtime>(memory: Tensor<R>, start: usize, new: &Tensor<R>) -> Result<Tensor<R>> {
    let mut memory = match memory.try_mut() {
        Ok(memory) => memory,
        Err(shared) => copied(&shared)?,
    };
    // Rows that were not written yet are 0, and the new rows are added to them.
    let place = ViewOp::Slice { axis: 2, start, len: new.shape()[2], step: 1 };
    memory.accumulate_view(&[place], &Op::identity(), &[new])?;
    memory.freeze()
}

fn copied<R: Runtime>(shared: &Tensor<R>) -> Result<TensorMut<R>> {
    let shape: Shape = shared.spec().shape;
    let mut memory = TensorMut::alloc(shared.runtime(), shape, shared.dtype())?;
    memory.accumulate(&Op::identity(), &[shared])?;
    Ok(memory)
}
