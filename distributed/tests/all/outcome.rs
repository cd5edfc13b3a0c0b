//! The outcome of a run: losses, norms and weights, joined from the pieces of all ranks.

use crate::prelude::*;

/// A model's weights on one rank: by name, how many the whole has, where these lie in it, and their values.
pub type Pieces = Vec<(String, usize, Vec<usize>, Vec<f64>)>;

/// The outcome of a run on one rank, or of all ranks.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunOutcome {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub pieces: Pieces,
}

/// The pieces of a model's weights on this rank.
pub fn pieces(model: &(impl Module<Cpu> + ?Sized)) -> Result<Pieces> {
    let piece = |(name, p): (String, Param<Cpu>)| {
        let values = p.value()?.to_f64s()?;
        let whole = || TensorPlacement::whole(p.shape());
        let placement = p.placed().map_or_else(whole, |placed| placed.placement().clone());
        let mut places = vec![0; values.len()];
        for run in placement.runs(0..values.len()) {
            (0..run.len).for_each(|k| places[run.local + k] = run.logical + k);
        }
        Ok((name, placement.logical().numel(), places, values))
    };
    model.named_parameters().into_iter().map(piece).collect()
}

/// Joins the outcomes of all ranks: unsharded weights, whose pieces agree to the bit wherever two ranks have the same
/// element.
pub fn assembled(ranks: Vec<RunOutcome>) -> RunOutcome {
    let mut whole: BTreeMap<String, Vec<Option<f64>>> = BTreeMap::new();
    for (rank, outcome) in ranks.iter().enumerate() {
        let same = (&outcome.losses, &outcome.norms) == (&ranks[0].losses, &ranks[0].norms);
        assert!(same, "rank {rank} has another outcome");
        for (name, all, places, values) in &outcome.pieces {
            let all = whole.entry(name.clone()).or_insert_with(|| vec![None; *all]);
            for (&place, &here) in places.iter().zip(values) {
                assert!(all[place].is_none_or(|there| there == here), "{name}: ranks differ in element {place}");
                all[place] = Some(here);
            }
        }
    }
    let complete = |(name, values): (String, Vec<Option<f64>>)| {
        let of = |v: Option<f64>| v.unwrap_or_else(|| panic!("{name}: an element is nowhere"));
        let values: Vec<f64> = values.into_iter().map(of).collect();
        (name, values.len(), (0..values.len()).collect(), values)
    };
    RunOutcome { pieces: whole.into_iter().map(complete).collect(), ..ranks[0].clone() }
}

/// The largest difference of two outcomes, relative to the largest value in each list.
pub fn distance(a: &RunOutcome, b: &RunOutcome) -> f64 {
    let lists = |t: &RunOutcome| {
        let weights: BTreeMap<_, _> =
            t.pieces.iter().map(|(name, .., values)| (name.clone(), values.clone())).collect();
        weights.into_values().chain([t.losses.clone(), t.norms.clone()]).collect::<Vec<_>>()
    };
    let (a, b) = (lists(a), lists(b));
    assert_eq!(a.iter().map(Vec::len).collect::<Vec<_>>(), b.iter().map(Vec::len).collect::<Vec<_>>());
    let of = |(x, y): (&Vec<f64>, &Vec<f64>)| {
        let scale = y.iter().fold(f64::MIN_POSITIVE, |m, v| m.max(v.abs()));
        x.iter().zip(y).map(|(x, y)| (x - y).abs() / scale).fold(0.0, larger)
    };
    a.iter().zip(&b).map(of).fold(0.0, larger)
}

/// Every tensor of the last checkpoint, whole, as bytes.
pub fn contents(folder: &Folder) -> BTreeMap<String, Vec<u8>> {
    let rt = cpu(0).unwrap();
    let last = folder.latest().unwrap().expect("a checkpoint");
    let mut reader = CheckpointReader::open(folder.step(last)).unwrap();
    let names: Vec<String> = reader.manifest().names().map(String::from).collect();
    names.into_iter().map(|name| (name.clone(), reader.tensor(&rt, &name).unwrap().to_bytes().unwrap())).collect()
}
