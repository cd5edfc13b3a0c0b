//! What a run tells: losses, norms, weights; put together of what each rank has.

use crate::prelude::*;

/// A model's weights on one rank: by name, how many the whole has, where these lie in it, and their values.
pub type Pieces = Vec<(String, usize, Vec<usize>, Vec<f64>)>;

/// What a run leaves.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub pieces: Pieces,
}

/// What this rank has of a model's weights.
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

/// One story of those of all ranks: whole weights, of pieces that agree to the bit wherever two ranks have the same
/// element.
pub fn assembled(ranks: Vec<Told>) -> Told {
    let mut whole: BTreeMap<String, Vec<Option<f64>>> = BTreeMap::new();
    for (rank, told) in ranks.iter().enumerate() {
        let same = (&told.losses, &told.norms) == (&ranks[0].losses, &ranks[0].norms);
        assert!(same, "rank {rank} tells another story");
        for (name, all, places, values) in &told.pieces {
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
    Told { pieces: whole.into_iter().map(complete).collect(), ..ranks[0].clone() }
}

/// The largest difference of two stories, relative to the largest value in each list.
pub fn apart(a: &Told, b: &Told) -> f64 {
    let lists = |t: &Told| {
        let weights: BTreeMap<_, _> =
            t.pieces.iter().map(|(name, .., values)| (name.clone(), values.clone())).collect();
        weights.into_values().chain([t.losses.clone(), t.norms.clone()]).collect::<Vec<_>>()
    };
    let (a, b) = (lists(a), lists(b));
    assert_eq!(a.iter().map(Vec::len).collect::<Vec<_>>(), b.iter().map(Vec::len).collect::<Vec<_>>());
    let of = |(x, y): (&Vec<f64>, &Vec<f64>)| {
        let scale = y.iter().fold(f64::MIN_POSITIVE, |m, v| m.max(v.abs()));
        x.iter().zip(y).fold(0.0, |m: f64, (x, y)| if x.is_nan() { f64::NAN } else { m.max((x - y).abs() / scale) })
    };
    a.iter().zip(&b).map(of).fold(0.0, |m: f64, d| if d.is_nan() { d } else { m.max(d) })
}

/// Every tensor of the last checkpoint, whole, as bytes.
pub fn contents(folder: &Folder) -> BTreeMap<String, Vec<u8>> {
    let rt = cpu(0).unwrap();
    let last = folder.latest().unwrap().expect("a checkpoint");
    let mut reader = CheckpointReader::open(folder.step(last)).unwrap();
    let names: Vec<String> = reader.manifest().names().map(String::from).collect();
    names.into_iter().map(|name| (name.clone(), reader.tensor(&rt, &name).unwrap().to_bytes().unwrap())).collect()
}
