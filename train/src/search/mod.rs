//! Searches of hyperparameters: a grid or random draws over fields of a TOML configuration, with early stopping by
//! successive halving. Any number of processes share one folder, and a search goes on after any interruption.
//!
//! ```
//! use train::search::{Halving, Search, SearchSpace};
//! # fn main() -> numcore::Result<()> {
//! let space = SearchSpace::from_toml("lr = 0.1\n[search]\nlr = { min = 1e-3, max = 1.0, log = true }")?;
//! # let folder = std::env::temp_dir().join(format!("weftgrad-doc-search-{}", std::process::id()));
//! let search = Search::random(&folder, space, 27, 7)
//!     .budget(90)
//!     .halving(Halving { factor: 3, first_budget: 10 })
//!     .metric("validation/loss");
//! let report = search.run(|trial| {
//!     // A real trial trains up to step `trial.budget` in `trial.folder`, with `Resume::IfThere`.
//!     Ok((trial.value::<f64>("lr")? - 0.1).abs() / trial.budget as f64)
//! })?;
//! let best = report.best().expect("a trial with a value");
//! assert_eq!(best.trial.budget, 90);
//! println!("{report}"); // the table; the folder has results.jsonl and report.html too
//! # std::fs::remove_dir_all(folder)?;
//! # Ok(())
//! # }
//! ```

mod report;
mod space;
mod trial;

use std::{
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use numcore::{Error, Result, Within, safetensors::replace_file};
pub use report::{SearchReport, SearchResult};
pub use space::SearchSpace;
pub use trial::Trial;

/// The interval at which trials of other processes are looked at again.
const POLL: Duration = Duration::from_millis(50);

/// A search of hyperparameters in a folder.
///
/// Trial `k` has the same values whatever ran before, and a rung's survivors depend on the values of all its trials. So
/// neither the order of trials, nor the number of processes, nor an interruption changes the result.
#[derive(Clone, Debug)]
#[doc(alias("sweep", "Tuner", "Study", "create_study", "GridSearch", "RandomSearch", "hyperparameter"))]
pub struct Search {
    folder: PathBuf,
    space: SearchSpace,
    /// The number of trials and the seed of a random search; none for a grid.
    random: Option<(u32, u64)>,
    metric: String,
    maximize: bool,
    budget: Option<u64>,
    halving: Option<Halving>,
}

/// Successive halving by synchronous rungs (Jamieson and Talwalkar 2016). All trials train for the first budget. The
/// best part of them, one in `factor`, trains on for `factor` times the budget, and so on up to the search's budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias("SuccessiveHalvingPruner", "SuccessiveHalving", "HyperBand", "ASHAScheduler", "early_terminate"))]
pub struct Halving {
    /// The factor between the budgets of two rungs, and between their numbers of trials; at least 2.
    pub factor: u64,
    /// The budget of the first rung, in steps.
    pub first_budget: u64,
}

impl Search {
    /// Makes a search through all combinations of values, in order: the last field, by name, varies fastest.
    pub fn grid(folder: impl Into<PathBuf>, space: SearchSpace) -> Self {
        let metric = "validation/loss".into();
        Search { folder: folder.into(), space, random: None, metric, maximize: false, budget: None, halving: None }
    }

    /// Makes a search of `trials` random draws, each a function of the seed and its own number.
    pub fn random(folder: impl Into<PathBuf>, space: SearchSpace, trials: u32, seed: u64) -> Self {
        Search { random: Some((trials, seed)), ..Self::grid(folder, space) }
    }

    /// Sets the budget of a trial, usually in steps. Without a call it is the configuration's own value of the
    /// [budget field](SearchSpace::budget_field), or 1 without such a field.
    pub fn budget(self, steps: u64) -> Self {
        Search { budget: Some(steps), ..self }
    }

    /// Stops trials early that are worse than others at the same budget.
    pub fn halving(self, halving: Halving) -> Self {
        Search { halving: Some(halving), ..self }
    }

    /// Sets the name of the value, for tables, pages and curves; `validation/loss` without a call.
    pub fn metric(self, name: impl Into<String>) -> Self {
        Search { metric: name.into(), ..self }
    }

    /// Makes the greatest value the best one; without a call it is the least.
    #[doc(alias("direction", "mode", "goal"))]
    pub fn maximize(self) -> Self {
        Search { maximize: true, ..self }
    }

    /// Runs all trials that are not finished, and writes `results.jsonl`, `results.txt` and `report.html`. The function
    /// trains a trial up to its budget and returns the metric's value.
    ///
    /// Other processes may run the same search in the folder. A trial is run by one of them; if it dies, another one
    /// goes on with the trial. All wait at the end of a rung. A trial that fails is recorded with its error, and is not
    /// run again. A value that is NaN is worse than any other. Neither is continued in a later rung.
    ///
    /// # Errors
    /// Names a field of the search that is invalid. Fails too if the folder has another search, if a file cannot be
    /// written, and for a trial that was [interrupted](Trial::interrupted).
    #[doc(alias("optimize", "fit", "agent"))]
    #[track_caller]
    pub fn run(&self, mut f: impl FnMut(&Trial) -> Result<f64>) -> Result<SearchReport> {
        self.run_with(&mut f).at_caller()
    }

    fn run_with(&self, f: &mut dyn FnMut(&Trial) -> Result<f64>) -> Result<SearchReport> {
        let budgets = self.budgets()?;
        let mut alive: Vec<u32> = (0..self.trials()?).collect();
        self.begin()?;
        let mut next_page = Instant::now();
        for (rung, budget) in budgets.into_iter().enumerate() {
            while !self.pass(&alive, (rung, budget), f, &mut next_page)? {
                sleep(POLL);
            }
            alive = self.survivors(&alive, rung, budget)?;
        }
        let report = self.report()?;
        report.write()?;
        Ok(report)
    }

    /// Runs the trials of a rung that nobody runs. True if all are finished then.
    fn pass(
        &self,
        alive: &[u32],
        (rung, budget): (usize, u64),
        f: &mut dyn FnMut(&Trial) -> Result<f64>,
        next_page: &mut Instant,
    ) -> Result<bool> {
        let mut is_finished = true;
        for &number in alive {
            let mut trial = self.trial(number, budget)?;
            if trial.outcome(rung)?.is_some() {
                continue;
            }
            if !trial.take()? {
                is_finished = false;
            } else {
                trial.run(rung, &mut *f)?;
                let now = Instant::now();
                if now >= *next_page {
                    self.report()?.write()?;
                    // So that pages of many trials take a twentieth of the time at most.
                    *next_page = Instant::now() + now.elapsed() * 20;
                }
            }
        }
        Ok(is_finished)
    }

    /// The trials that a rung's successor continues, in the order of their numbers: the best of those with a value.
    fn survivors(&self, alive: &[u32], rung: usize, budget: u64) -> Result<Vec<u32>> {
        let most = alive.len() / self.halving.map_or(1, |halving| halving.factor as usize);
        let mut ranked = Vec::new();
        for &number in alive {
            match self.trial(number, budget)?.outcome(rung)? {
                Some(Ok(value)) if !value.is_nan() => ranked.push((value, number)),
                _ => {}
            }
        }
        ranked.sort_by(|a, b| self.better(a.0, b.0).then(a.1.cmp(&b.1)));
        ranked.truncate(most.max(1));
        let mut numbers: Vec<u32> = ranked.into_iter().map(|(_, number)| number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// The results so far, of all processes. Runs nothing.
    ///
    /// # Errors
    /// Names a field of the search that is invalid, or a file that is no result.
    pub fn report(&self) -> Result<SearchReport> {
        let budgets = self.budgets()?;
        let mut results = Vec::new();
        for number in 0..self.trials()? {
            let mut points = Vec::new();
            for (rung, &budget) in budgets.iter().enumerate() {
                match self.trial(number, budget)?.outcome(rung)? {
                    Some(outcome) => points.push((budget, outcome)),
                    None => break,
                }
            }
            let Some((budget, outcome)) = points.pop() else { continue };
            let points = points.into_iter().filter_map(|(budget, outcome)| Some((budget, outcome.ok()?))).collect();
            results.push(SearchResult { trial: self.trial(number, budget)?, outcome, points });
        }
        // Values, then NaN, then errors; of values, those of the greatest budget first.
        let class = |result: &SearchResult| match result.outcome {
            Ok(value) => u8::from(value.is_nan()),
            Err(_) => 2,
        };
        results.sort_by(|a, b| {
            let values = [a, b].map(|result| *result.outcome.as_ref().unwrap_or(&f64::NAN));
            let by_budget = b.trial.budget.cmp(&a.trial.budget);
            class(a).cmp(&class(b)).then(by_budget).then(self.better(values[0], values[1]))
        });
        Ok(SearchReport { folder: self.folder.clone(), metric: self.metric.clone(), about: self.about(), results })
    }

    /// Less for the better of two values; equal for any two of which one is NaN, or which are zeros.
    fn better(&self, a: f64, b: f64) -> std::cmp::Ordering {
        let ascending = a.partial_cmp(&b).unwrap_or(std::cmp::Ordering::Equal);
        if self.maximize { ascending.reverse() } else { ascending }
    }

    /// The budgets of the rungs, each at least `factor` times the one before.
    fn budgets(&self) -> Result<Vec<u64>> {
        let range = |name, value: u64, allowed: String| Err(Error::range("Search", name, value as i64, allowed));
        let most = self.budget.unwrap_or_else(|| self.space.budget());
        if most == 0 {
            return range("budget", 0, "at least 1".into());
        }
        let Some(Halving { factor, first_budget }) = self.halving else { return Ok(vec![most]) };
        if factor < 2 {
            return range("factor", factor, "at least 2".into());
        }
        if first_budget == 0 || first_budget > most {
            return range("first_budget", first_budget, format!("in 1..={most}, the budget of the search"));
        }
        let grown = std::iter::successors(Some(first_budget), |budget| budget.checked_mul(factor));
        let before_last = |budget: &u64| budget.checked_mul(factor).is_some_and(|next| next <= most);
        Ok(grown.take_while(before_last).chain([most]).collect())
    }

    fn trials(&self) -> Result<u32> {
        match self.random {
            None => self.space.combinations(),
            Some((0, _)) => Err(Error::range("Search", "trials", 0, "at least 1")),
            Some((trials, _)) => Ok(trials),
        }
    }

    fn trial(&self, number: u32, budget: u64) -> Result<Trial> {
        let values = match self.random {
            Some((_, seed)) => self.space.drawn(seed, number),
            None => self.space.of_grid(number),
        };
        let folder = self.folder.join(format!("trial-{number:04}"));
        let config = self.space.config(&values, budget, &folder.to_string_lossy())?;
        let fields = self.space.fields().map(String::from).zip(values.iter().map(trial::shown)).collect();
        Ok(Trial { number, budget, folder, fields, config, claim: None })
    }

    /// The options of the search, by name.
    fn about(&self) -> Vec<(&'static str, String)> {
        let kind = match self.random {
            Some((trials, seed)) => format!("random: {trials} trials, seed {seed}"),
            None => "grid".into(),
        };
        let best = if self.maximize { "greatest" } else { "least" };
        let budgets = self.budgets().unwrap_or_default().iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let factor = self.halving.map_or("none".into(), |halving| halving.factor.to_string());
        let metric = self.metric.clone();
        vec![("search", kind), ("metric", metric), ("best", best.into()), ("budgets", budgets), ("factor", factor)]
    }

    /// Writes `search.txt`, which says what is searched, or compares it with that of an earlier start.
    fn begin(&self) -> Result<()> {
        let _lock = trial::lock(&self.folder, true)?;
        let path: &Path = &self.folder.join("search.txt");
        let about: String = self.about().iter().map(|(name, value)| format!("# {name}: {value}\n")).collect();
        let text = about + self.space.definition();
        let before = match std::fs::read_to_string(path) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return replace_file(path, text.as_bytes()),
            before => before.map_err(|e| Error::io(path, e))?,
        };
        if before == text {
            return Ok(());
        }
        let [was, is] = [&before, &text].map(|text| text.lines().map(str::trim).collect::<Vec<_>>());
        let first = (0..).find(|&i| was.get(i) != is.get(i)).unwrap_or(0);
        let [was, is] =
            [was, is].map(|lines| lines.get(first).copied().unwrap_or("").trim_start_matches("# ").to_string());
        let why =
            format!("another search is in this folder, with `{was}` where this one has `{is}`: take another folder");
        Err(Error::format(path.display().to_string(), why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_another_process_finished_before_it_was_taken_is_not_run() {
        let folder = std::env::temp_dir().join(format!("weftgrad-search-taken-{}", std::process::id()));
        let space = SearchSpace::from_toml("lr = 1.0\n[search]\nlr = [1.0]").unwrap();
        let mut trial = Search::grid(&folder, space).trial(0, 1).unwrap();
        assert!(trial.take().unwrap());
        trial.run(0, |_| Ok(3.0)).unwrap();
        trial.run(0, |_| panic!("ran again")).unwrap();
        assert_eq!(trial.outcome(0).unwrap(), Some(Ok(3.0)));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
