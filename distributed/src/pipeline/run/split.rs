//! Cutting a list of layers into stages.

use std::collections::HashMap;

use nn::{Forward, ModuleExt, Sequential};
use numcore::{Error, Result, Runtime, Within};

use super::Stage;

/// Cuts layers into `cuts.len() + 1` stages; each cut is the number of the first layer of the next stage.
///
/// ```
/// use distributed::pipeline::{balanced, split};
/// use nn::{Init, Linear, Relu, Sequential};
/// # use numcore::NullRuntime;
/// # fn main() -> numcore::Result<()> {
/// let init = Init::new(&NullRuntime::new(), 0);
/// let model = Sequential::new().push(Linear::new(&init, 8, 8)?).push(Relu).push(Linear::new(&init, 8, 8)?);
/// let layers = model.into_layers();
/// let cuts = balanced(&layers, 2)?;
/// assert_eq!(split(layers, &cuts)?.len(), 2);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Fails if cuts do not ascend or leave a stage without layers, or if two stages would share a parameter. Stages on
/// different ranks cannot share, so one of them needs a [copy](nn::Param::duplicate).
#[track_caller]
pub fn split<R: Runtime>(layers: Vec<Box<dyn Forward<R>>>, cuts: &[usize]) -> Result<Vec<Box<dyn Stage<R>>>> {
    let bounds: Vec<usize> = std::iter::once(0).chain(cuts.iter().copied()).chain([layers.len()]).collect();
    if !bounds.is_sorted_by(|a, b| a < b) {
        let why = format!("cuts {cuts:?} must ascend and leave every stage at least one of {} layers", layers.len());
        return Err(Error::config("pipeline split", "cuts", why)).at_caller();
    }
    let stages = Sequential::from_iter(layers).split(cuts);
    refuse_sharing(&stages)?;
    Ok(stages.into_iter().map(|stage| Box::new(stage) as _).collect())
}

/// Computes cuts that minimize the number of parameters of the largest stage. Of equal solutions it takes the earliest
/// last cut, and then balances the stages before it likewise.
///
/// # Errors
/// Fails if there are fewer layers than stages, or if `stages` is 0.
#[track_caller]
pub fn balanced<R: Runtime>(layers: &[Box<dyn Forward<R>>], stages: usize) -> Result<Vec<usize>> {
    if stages == 0 || layers.len() < stages {
        let allowed = format!("in 1..={}, the number of layers", layers.len());
        return Err(Error::range("pipeline split", "number of stages", stages, allowed)).at_caller();
    }
    let sizes: Vec<usize> = layers.iter().map(|layer| layer.num_parameters().total).collect();
    Ok(cuts(&sizes, stages))
}

/// Solves the linear partition problem: `least[k][n]` is the least possible size of the largest of `k + 1` stages of
/// the first `n` layers.
fn cuts(sizes: &[usize], stages: usize) -> Vec<usize> {
    let layers = sizes.len();
    let mut before = vec![0; layers + 1];
    (0..layers).for_each(|n| before[n + 1] = before[n] + sizes[n]);
    let mut least = vec![before.clone()];
    let mut last_cut = vec![vec![0; layers + 1]];
    for k in 1..stages {
        let (mut row, mut cut) = (vec![usize::MAX; layers + 1], vec![0; layers + 1]);
        for n in k + 1..=layers {
            let largest = |at: usize| least[k - 1][at].max(before[n] - before[at]);
            let best = (k..n).min_by_key(|&at| largest(at)).unwrap_or(k);
            (row[n], cut[n]) = (largest(best), best);
        }
        least.push(row);
        last_cut.push(cut);
    }
    let mut cuts = Vec::new();
    let mut end = layers;
    for k in (1..stages).rev() {
        end = last_cut[k][end];
        cuts.push(end);
    }
    cuts.reverse();
    cuts
}

fn refuse_sharing<R: Runtime>(stages: &[Sequential<R>]) -> Result<()> {
    let mut seen: HashMap<usize, (usize, String)> = HashMap::new();
    for (stage, layers) in stages.iter().enumerate() {
        for (name, parameter) in layers.named_parameters() {
            match seen.get(&parameter.leaf().id()) {
                Some((other, first)) if *other != stage => {
                    let why = format!(
                        "stages {other} and {stage} share a parameter, `{first}` and `{name}`: give one a copy (`Param::duplicate`)"
                    );
                    return Err(Error::state(name, why));
                }
                _ => _ = seen.insert(parameter.leaf().id(), (stage, name)),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::cuts;

    #[test]
    fn the_largest_stage_is_as_small_as_it_can_be() {
        let check = |sizes: &[usize], stages, want: &[usize]| assert_eq!(cuts(sizes, stages), want, "{sizes:?}");
        check(&[1, 2, 3, 4, 5], 1, &[]);
        check(&[1, 2, 3, 4, 5], 2, &[3]);
        check(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 3, &[5, 7]);
        check(&[9, 0, 9, 0, 9], 3, &[1, 3]);
        check(&[0, 0, 0], 3, &[1, 2]);
        check(&[100, 1, 1, 1], 2, &[1]);
    }

    #[test]
    fn it_is_the_best_of_all_cuts() {
        let sizes = [3, 1, 4, 1, 5, 9, 2, 6];
        let largest = |a: usize, b: usize| {
            [&sizes[..a], &sizes[a..b], &sizes[b..]].map(|part| part.iter().sum::<usize>()).into_iter().max().unwrap()
        };
        let best = (1..8).flat_map(|a| (a + 1..8).map(move |b| (a, b))).map(|(a, b)| largest(a, b)).min().unwrap();
        let found = cuts(&sizes, 3);
        assert_eq!(largest(found[0], found[1]), best);
    }
}
