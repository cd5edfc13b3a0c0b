//! Which layers of a model are cut, and how: a table of names.

/// How a layer is cut over the ranks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorStyle {
    /// Along its outputs, which stay cut (Hugging Face: `colwise`).
    Column,
    /// Along its inputs, which are cut already; outputs are summed over ranks (`rowwise`).
    Row,
    /// Along the rows of a vocabulary: an embedding, or the projection to logits.
    Vocabulary,
    /// Not at all.
    Replicated,
}

/// A plan of tensor parallelism: patterns of names, each with a style. Layers that no pattern names are replicated.
///
/// A pattern is the name of a layer, or of a parameter, in the model; `*` stands for any one part of it between dots. A model type has its
/// own, as [`Gpt::tensor_plan`](crate::Gpt::tensor_plan); for a model of one's own:
///
/// ```
/// use nn::parallel::TensorPlan;
/// let plan = TensorPlan::new().column("layers.*.up").row("layers.*.down").vocabulary("embedding");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "a plan is applied to a model"]
pub struct TensorPlan {
    entries: Vec<PlanEntry>,
    sequence: bool,
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlanEntry {
    pub(super) pattern: String,
    pub(super) style: TensorStyle,
    pub(super) partial: Partiality,
    /// Whether the model may lack what the pattern names.
    pub(super) optional: bool,
}

/// When the gradient of what is replicated is a part of a sum over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Partiality {
    Never,
    /// Where the sequence is cut.
    OfSequence,
    Always,
}

impl TensorPlan {
    /// A plan that cuts nothing.
    pub fn new() -> Self {
        TensorPlan::default()
    }

    /// Cuts these linear layers along their outputs, which stay cut: what comes next works on a part of the channels or heads.
    pub fn column(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Column, Partiality::Never)
    }

    /// Cuts these linear layers along their inputs, which a column-parallel layer has left cut.
    pub fn row(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Row, Partiality::Never)
    }

    /// Cuts these embeddings, or projections to logits, along the vocabulary.
    pub fn vocabulary(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Vocabulary, Partiality::Never)
    }

    /// Leaves these layers whole, as it leaves those that are not named.
    pub fn replicated(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::Never)
    }

    /// Leaves these layers whole, though each rank applies them to a part of the values: their gradients are summed over the ranks once a
    /// step. Norms of the heads of queries and keys are such layers.
    pub fn partial_gradient(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::Always)
    }

    /// Leaves these layers whole. With [`sequence_parallel`](TensorPlan::sequence_parallel) they compute on a part of the sequence, so their
    /// gradients are partial then.
    pub fn sequence(self, pattern: impl Into<String>) -> Self {
        self.with(pattern, TensorStyle::Replicated, Partiality::OfSequence)
    }

    /// This plan without its lines for a pattern: what it names stays whole.
    pub fn without(mut self, pattern: &str) -> Self {
        self.entries.retain(|entry| entry.pattern != pattern);
        self
    }

    /// Lets a model lack the layers of the last pattern: a head, where it is the embedding.
    pub fn if_there(mut self) -> Self {
        self.entries.iter_mut().next_back().into_iter().for_each(|last| last.optional = true);
        self
    }

    /// Whether the values between the layers, which all ranks have otherwise, are cut along the sequence (Korthikanti et al. 2022): norms,
    /// dropout and residuals are computed once, on a part by each rank. Sums become pairs of a reduce-scatter and an all-gather, which
    /// move as many bytes. A plan whose model can do so names the layers that compute on parts ([`sequence`](TensorPlan::sequence)).
    pub fn sequence_parallel(mut self, yes: bool) -> Self {
        self.sequence = yes;
        self
    }

    /// Whether values between the layers are cut along the sequence.
    pub fn is_sequence_parallel(&self) -> bool {
        self.sequence
    }

    pub(super) fn entries(&self) -> &[PlanEntry] {
        &self.entries
    }

    fn with(mut self, pattern: impl Into<String>, style: TensorStyle, partial: Partiality) -> Self {
        self.entries.push(PlanEntry { pattern: pattern.into(), style, partial, optional: false });
        self
    }
}

impl PlanEntry {
    /// Whether the pattern names a parameter, or the layer that it is of.
    pub(super) fn names(&self, parameter: &str) -> bool {
        let layer = parameter.rsplit_once('.').map_or("", |(layer, _)| layer);
        matches(&self.pattern, parameter) || matches(&self.pattern, layer)
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    let (mut pattern, mut name) = (pattern.split('.'), name.split('.'));
    loop {
        match (pattern.next(), name.next()) {
            (None, None) => return true,
            (Some(p), Some(n)) if p == n || (p == "*" && !n.is_empty()) => {}
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_names_layers_and_their_parameters() {
        for (pattern, name, is) in [
            ("blocks.*.qkv", "blocks.3.qkv.weight", true),
            ("blocks.*.qkv", "blocks.3.qkv", true),
            ("blocks.*.qkv", "blocks.3.attn.qkv.weight", false),
            ("blocks.*.qkv", "blocks.qkv.weight", false),
            ("blocks.*.qkv.weight", "blocks.3.qkv.weight", true),
            ("blocks.*.qkv.weight", "blocks.3.qkv.bias", false),
            ("*", "wte.weight", true),
            ("wte", "wte2.weight", false),
            ("", "weight", true),
        ] {
            let entry = PlanEntry {
                pattern: pattern.into(),
                style: TensorStyle::Row,
                partial: Partiality::Never,
                optional: false,
            };
            assert_eq!(entry.names(name), is, "{pattern} {name}");
        }
    }
}
