//! Searches of hyperparameters: their trials, who survives, interruptions, and processes that share a folder.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Mutex,
    thread::{scope, sleep},
    time::Duration,
};

use numcore::{Error, Result, rng::Philox};
use train::search::{Halving, Search, SearchReport, SearchSpace, Trial};

/// A folder that is removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("weftgrad-search-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const BASE: &str =
    "out = \"\"\nsteps = 90\nname = \"a\"\n[optimizer]\nlr = 0.1\ndecay = 0.0\nwarmup = 5\nbetas = [0.9, 0.99]\n";

fn space(search: &str) -> SearchSpace {
    SearchSpace::from_toml(&format!("{BASE}[search]\n{search}")).unwrap()
}

fn ranges() -> SearchSpace {
    space(
        "name = [\"a\", \"b c\"]\noptimizer.lr = { min = 1e-4, max = 1, log = true }
         optimizer.decay = { min = -1, max = 3 }\noptimizer.warmup = { min = 1, max = 1000, log = true }",
    )
}

/// A loss that falls with the budget, in another order at each: only rungs that were run in turn find these survivors.
fn value(number: u32, budget: u64) -> f64 {
    let mixed = (u64::from(number) + 1) * (budget + 7) * 2_654_435_761 % 1_000_003;
    mixed as f64 / 1e6 + 1.0 / budget as f64
}

fn halved(folder: &Path) -> Search {
    Search::random(folder, ranges(), 27, 5).budget(90).halving(Halving { factor: 3, first_budget: 10 })
}

/// The trials and budgets of `halved`, by the definition of successive halving.
fn expected(values: impl Fn(u32, u64) -> f64) -> BTreeMap<u64, BTreeSet<u32>> {
    let mut alive: Vec<u32> = (0..27).collect();
    let mut rungs = BTreeMap::new();
    for (budget, next) in [(10, 9), (30, 3), (90, 1)] {
        rungs.insert(budget, alive.iter().copied().collect());
        alive.sort_by(|&a, &b| values(a, budget).total_cmp(&values(b, budget)).then(a.cmp(&b)));
        alive.truncate(next);
    }
    rungs
}

/// Everything that a report says.
fn told(report: &SearchReport) -> String {
    format!("{report}{}", report.to_jsonl())
}

fn configs(search: &Search) -> Vec<String> {
    let mut seen = Vec::new();
    search
        .run(|trial| {
            seen.push(trial.config());
            Ok(0.0)
        })
        .unwrap();
    seen
}

#[test]
fn a_grid_goes_through_all_combinations_in_order() {
    let scratch = Scratch::new("grid");
    let mut seen = Vec::new();
    let search = Search::grid(&scratch.0, space("optimizer.lr = [1, 0.5, 0.25]\nname = [\"x\", \"y\"]"));
    let report = search
        .run(|trial| {
            assert_eq!(trial.value::<u64>("optimizer.warmup")?, 5);
            assert_eq!(fs::read_to_string(trial.config_path())?, trial.config());
            assert!(trial.folder.is_dir() && trial.budget == 1);
            seen.push((trial.number, trial.value::<String>("name")?, trial.value::<f64>("optimizer.lr")?));
            Ok(-trial.value::<f64>("optimizer.lr")?)
        })
        .unwrap();
    let all = [("x", 1.0), ("x", 0.5), ("x", 0.25), ("y", 1.0), ("y", 0.5), ("y", 0.25)];
    let all: Vec<_> = (0..).zip(all).map(|(i, (name, lr))| (i, name.to_string(), lr)).collect();
    assert_eq!(seen, all);
    let ranking: Vec<u32> = report.results.iter().map(|result| result.trial.number).collect();
    assert_eq!(ranking, [0, 3, 1, 4, 2, 5], "the least first, ties by number");
    let up = Search::grid(&scratch.0, space("optimizer.lr = [1, 0.5, 0.25]\nname = [\"x\", \"y\"]")).maximize();
    assert_eq!(up.report().unwrap().best().unwrap().trial.number, 2);
}

#[test]
fn random_trials_are_functions_of_seed_and_number() {
    let [some, more, other] = ["some", "more", "other"].map(Scratch::new);
    let first = configs(&Search::random(&some.0, ranges(), 50, 1));
    assert_eq!(first[..], configs(&Search::random(&more.0, ranges(), 400, 1))[..50]);
    assert_ne!(first, configs(&Search::random(&other.0, ranges(), 50, 2)));
    let report = Search::random(&more.0, ranges(), 400, 1).report().unwrap();
    let all = |name: &str| -> Vec<f64> { report.results.iter().map(|r| r.trial.value(name).unwrap()).collect() };
    for (name, min, max, middle) in [
        ("optimizer.lr", 1e-4, 1.0, 1e-2),
        ("optimizer.decay", -1.0, 3.0, 1.0),
        ("optimizer.warmup", 1.0, 1000.0, 31.0),
    ] {
        let values = all(name);
        assert!(values.iter().all(|x| (min..=max).contains(x)), "{name}");
        let below = values.iter().filter(|&&x| x <= middle).count();
        assert!((150..250).contains(&below), "{name}: {below} of 400 are below the middle");
    }
    assert!(report.results.iter().all(|r| r.trial.value::<u64>("optimizer.warmup").is_ok()), "integers stay integers");
    let dice = Scratch::new("dice");
    let report = Search::random(&dice.0, space("steps = { min = 1, max = 6 }"), 200, 0);
    let seen: BTreeSet<String> = configs(&report).into_iter().collect();
    assert_eq!(seen.len(), 6, "both ends are drawn");
}

#[test]
fn halving_keeps_the_best_of_each_rung() {
    let scratch = Scratch::new("halving");
    let mut ran: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
    let report = halved(&scratch.0)
        .run(|trial| {
            assert!(ran.entry(trial.budget).or_default().insert(trial.number), "runs once");
            Ok(value(trial.number, trial.budget))
        })
        .unwrap();
    let expected = expected(value);
    assert_eq!(ran, expected);
    assert_eq!(ran.values().map(BTreeSet::len).collect::<Vec<_>>(), [27, 9, 3]);
    let last = |&number: &u32| (value(number, 90) * 1e9) as u64;
    let best = report.best().unwrap();
    assert_eq!(Some(best.trial.number), expected[&90].iter().copied().min_by_key(last));
    let points = [10, 30].map(|budget| (budget, value(best.trial.number, budget)));
    assert_eq!(best.points, points);
    let reached: Vec<u64> = report.results.iter().map(|result| result.trial.budget).collect();
    assert_eq!(reached, [vec![90; 3], vec![30; 6], vec![10; 18]].concat());
    // Of equal values those with smaller numbers go on, and one goes on where there are fewer than `factor`.
    for (trials, expected) in [(9, vec![0, 1, 2]), (2, vec![0])] {
        let (scratch, mut later) = (Scratch::new("equal"), Vec::new());
        let search = Search::random(&scratch.0, ranges(), trials, 5).budget(30);
        let report = search.halving(Halving { factor: 3, first_budget: 10 }).run(|trial| {
            later.extend((trial.budget == 30).then_some(trial.number));
            Ok(1.0)
        });
        assert_eq!(later, expected);
        assert_eq!(report.unwrap().best().unwrap().trial.number, 0);
    }
    // The last budget is that of the search, at least `factor` times the one before.
    for (most, budgets) in [(90, "10, 30, 90"), (89, "10, 89"), (100, "10, 30, 100"), (269, "10, 30, 269"), (10, "10")]
    {
        let scratch = Scratch::new("budgets");
        let search = halved(&scratch.0).budget(most);
        search.run(|trial| Ok(f64::from(trial.number))).unwrap();
        let about = fs::read_to_string(scratch.0.join("search.txt")).unwrap();
        assert!(about.contains(&format!("# budgets: {budgets}\n")), "{about}");
    }
}

#[test]
fn the_budget_is_that_of_the_configuration_unless_it_is_set() {
    let scratch = Scratch::new("budget-field");
    let named = space("optimizer.lr = [0.1, 0.2]").budget_field("steps").unwrap().folder_field("out").unwrap();
    Search::grid(&scratch.0, named)
        .halving(Halving { factor: 2, first_budget: 45 })
        .run(|trial| {
            assert_eq!(trial.value::<u64>("steps")?, trial.budget);
            assert_eq!(trial.value::<PathBuf>("out")?, trial.folder);
            assert!(trial.budget == 45 || trial.budget == 90);
            trial.value("optimizer.lr")
        })
        .unwrap();
    assert!(scratch.0.join("trial-0000/rung-1.json").is_file() && !scratch.0.join("trial-0001/rung-1.json").exists());
}

#[test]
fn failures_and_nan_come_last_and_never_go_on() {
    let scratch = Scratch::new("failures");
    let search = Search::random(&scratch.0, ranges(), 6, 0).budget(20).halving(Halving { factor: 2, first_budget: 10 });
    let mut later = Vec::new();
    let report = search
        .run(|trial| match (trial.number, trial.budget) {
            (0, _) => Err(Error::usage("train", "diverged\nbadly")),
            (1 | 4, 10) => Ok(f64::NAN),
            (2, 10) => Ok(f64::INFINITY),
            (3, 10) => Ok(f64::NEG_INFINITY),
            (5, 10) => Ok(-0.0),
            (number, _) => {
                later.push(number);
                if number == 5 { Err(Error::usage("train", "late")) } else { Ok(f64::NAN) }
            }
        })
        .unwrap();
    assert_eq!(later, [2, 3, 5]);
    let order: Vec<u32> = report.results.iter().map(|result| result.trial.number).collect();
    assert_eq!(order, [2, 3, 1, 4, 5, 0], "NaN by budget, then failures by budget");
    assert!(report.best().is_none());
    assert_eq!(told(&search.report().unwrap()), told(&report), "read back");
    let text = report.to_string();
    assert!(text.lines().last().unwrap().contains("failed") && text.contains("diverged"), "{text}");
    assert!(report.to_jsonl().contains("\"value\":\"NaN\"") && report.to_jsonl().contains("diverged\\nbadly"));
    // Nothing is left to continue: the search ends all the same.
    let scratch = Scratch::new("nothing");
    let report = halved(&scratch.0).run(|_| Ok(f64::NAN)).unwrap();
    assert!(report.best().is_none() && report.results.len() == 27);
}

#[test]
fn an_interruption_at_any_trial_changes_nothing() {
    let whole = Scratch::new("whole");
    let expected_report = told(&halved(&whole.0).run(|trial| Ok(value(trial.number, trial.budget))).unwrap());
    for seed in 0..6 {
        let scratch = Scratch::new("interrupted");
        let mut random = Philox::new(seed, 0);
        let mut finished = BTreeSet::new();
        let mut starts = 0;
        let report = loop {
            starts += 1;
            let mut left = random.below(12);
            // By a panic, after which nothing of the search runs, or by an error.
            let panics = random.bernoulli(0.5);
            let search = halved(&scratch.0);
            let run = || {
                search.run(|trial| {
                    if left == 0 {
                        assert!(!panics, "killed");
                        return Err(trial.interrupted());
                    }
                    left -= 1;
                    assert!(finished.insert((trial.number, trial.budget)), "a finished trial ran again");
                    Ok(value(trial.number, trial.budget))
                })
            };
            if let Ok(Ok(report)) = catch_unwind(AssertUnwindSafe(run)) {
                break report;
            }
        };
        assert!(starts > 3 && finished.len() == 39);
        assert_eq!(told(&report), expected_report, "seed {seed}");
    }
}

#[test]
fn several_at_once_never_run_a_trial_twice() {
    let whole = Scratch::new("alone");
    let alone = &told(&halved(&whole.0).run(|trial| Ok(value(trial.number, trial.budget))).unwrap());
    for milliseconds in [0, 0, 0, 3] {
        let (scratch, begun) = (Scratch::new("together"), Mutex::new(BTreeSet::new()));
        scope(|threads| {
            for _ in 0..5 {
                let (begun, folder) = (&begun, &scratch.0);
                threads.spawn(move || {
                    let report = halved(folder).run(|trial| {
                        assert!(begun.lock().unwrap().insert((trial.number, trial.budget)), "ran twice");
                        sleep(Duration::from_millis(milliseconds));
                        Ok(value(trial.number, trial.budget))
                    });
                    assert_eq!(told(&report.unwrap()), *alone);
                });
            }
        });
        assert_eq!(begun.into_inner().unwrap().len(), 39);
    }
}

const FOLDER: &str = "WEFTGRAD_TEST_SEARCH_FOLDER";

/// The process that the next test starts.
#[test]
fn child() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let report = halved(Path::new(&folder)).run(|trial| {
        let path = trial.folder.join(format!("ran-{}", trial.budget));
        sleep(Duration::from_millis(4));
        fs::write(path, "")?;
        Ok(value(trial.number, trial.budget))
    });
    report.unwrap();
}

fn start(folder: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--test-threads", "1"]).env(FOLDER, folder);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn processes_that_are_killed_leave_their_trials_to_others() {
    let whole = Scratch::new("unkilled");
    let expected_report = told(&halved(&whole.0).run(|trial| Ok(value(trial.number, trial.budget))).unwrap());
    for seed in 0..4 {
        let (scratch, mut random) = (Scratch::new("killed"), Philox::new(seed, 1));
        let mut others: Vec<Child> = (0..2).map(|_| start(&scratch.0)).collect();
        for _ in 0..4 {
            sleep(Duration::from_millis(20 + random.below(60)));
            let mut killed = others.remove(0);
            killed.kill().unwrap();
            killed.wait().unwrap();
            others.push(start(&scratch.0));
        }
        for mut child in others {
            assert!(child.wait().unwrap().success(), "seed {seed}");
        }
        let report = halved(&scratch.0).run(|trial| panic!("trial {} was finished", trial.number)).unwrap();
        assert_eq!(told(&report), expected_report, "seed {seed}");
        assert_eq!(fs::read_to_string(scratch.0.join("results.txt")).unwrap(), report.to_string());
        assert_eq!(fs::read_to_string(scratch.0.join("results.jsonl")).unwrap(), report.to_jsonl());
    }
}

#[test]
fn the_page_has_values_and_curves_with_the_best_first() {
    let scratch = Scratch::new("page");
    let search = Search::grid(&scratch.0, space("name = [\"<a>\", \"b\", \"c\"]")).metric("loss");
    let report = search
        .run(|trial| {
            let record = |step: u64, x: f64| train::Record::new(step, 0).scalar("loss", x).scalar("lr", 7.0);
            let mut sink = train::sink::Jsonl::in_folder(&trial.folder)?;
            for step in 1..=5 {
                train::Sink::write(&mut sink, &record(step, 3.0 - f64::from(trial.number) + 1.0 / step as f64))?;
            }
            if trial.number == 1 { Err(Error::usage("f", "broken")) } else { trial.last_recorded("loss") }
        })
        .unwrap();
    let page = fs::read_to_string(scratch.0.join("report.html")).unwrap();
    assert_eq!(page, report.to_html());
    assert!(page.contains("&lt;a&gt;") && !page.contains("<a>") && page.contains("broken"));
    assert_eq!(page.matches("<svg").count(), 4, "one of the best together, and one for each");
    let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text}: {page}"));
    assert!(at("trial 2") < at("trial 0") && at("trial 0") < at("trial 1"));
    assert_eq!(report.best().unwrap().outcome, Ok(1.2));
    let failing = |trial: &Trial| trial.last_recorded("accuracy").unwrap_err().to_string();
    assert!(failing(&report.results[0].trial).contains("has no value `accuracy`"));
}

#[test]
fn malformed_searches_are_errors_that_name_the_field() {
    let read = |search: &str| SearchSpace::from_toml(&format!("{BASE}{search}")).map(|_| ()).unwrap_err().to_string();
    for (search, part) in [
        ("[search", "TOML"),
        ("", "`search`: names no field"),
        ("[search]", "`search`: names no field"),
        ("[search.optimizer]", "`search`: names no field"),
        ("[search]\nrate = [1]", "`rate`: is no field"),
        ("[search]\noptimizer.rate = [1]", "`optimizer.rate`: is no field"),
        ("[search]\nsteps.most = [1]", "`steps`: is a range without `min`"),
        ("[search]\noptimizer = [1]", "`optimizer`: is a table"),
        ("[search]\nsteps = []", "`steps`: has no values"),
        ("[search]\nsteps = 3", "`steps`: has the value 3"),
        ("[search]\nsteps = [1.5]", "`steps`: has the type integer"),
        ("[search]\nsteps = { min = 1, max = 2.5 }", "`steps`: has the type integer"),
        ("[search]\nname = [1]", "`name`: has the type string"),
        ("[search]\nname = { min = \"a\", max = \"b\" }", "`name`"),
        ("[search]\nsteps = { min = 1 }", "`steps`: is a range without `max`"),
        ("[search]\nsteps = { min = 2, max = 1 }", "`steps`: has an empty"),
        ("[search]\nsteps = { min = 0, max = 1, log = true }", "`steps`: has a range with `log`"),
        ("[search]\nsteps = { min = 1, max = 2, step = 1 }", "`steps`: has `step`"),
        ("[search]\nsteps = { min = 1, max = 2, log = 1 }", "`steps`: has `log = 1`"),
        ("[search]\noptimizer.lr = { min = nan, max = 1 }", "`optimizer.lr`: has an empty or infinite"),
        ("[search]\noptimizer.lr = { min = 0, max = inf }", "`optimizer.lr`: has an empty or infinite"),
        ("[search]\noptimizer.lr = [1]\n\"optimizer.lr\" = [2]", "`optimizer.lr`: is there twice"),
    ] {
        assert!(read(search).contains(part), "{search:?}: {}", read(search));
    }
    assert!(SearchSpace::from_toml("search = 3").unwrap_err().to_string().contains("`search`: is a table"));
    let text = |result: Result<SearchSpace>| result.unwrap_err().to_string();
    assert!(text(space("steps = [1]").budget_field("steps")).contains("`steps`: is set by the search"));
    assert!(text(space("steps = [1]").budget_field("name")).contains("`name`: has the type string"));
    assert!(text(space("steps = [1]").folder_field("folder")).contains("`folder`: is no field"));
}

#[test]
fn searches_that_cannot_run_are_errors() {
    let scratch = Scratch::new("invalid");
    let text = |search: Search| search.run(|_| panic!("ran")).unwrap_err().to_string();
    let halving = |factor, first_budget| halved(&scratch.0).halving(Halving { factor, first_budget });
    for (search, part) in [
        (halved(&scratch.0).budget(0), "budget is 0"),
        (halving(1, 10), "factor is 1"),
        (halving(3, 0), "first_budget is 0"),
        (halving(3, 91), "first_budget is 91, and must be in 1..=90"),
        (Search::random(&scratch.0, ranges(), 0, 1), "trials is 0"),
        (Search::grid(&scratch.0, ranges()), "`optimizer.decay`: is a range"),
    ] {
        let error = text(search);
        assert!(error.contains(part), "{error}");
    }
    assert!(!scratch.0.exists(), "nothing was written");
    halved(&scratch.0).run(|_| Ok(1.0)).unwrap();
    let other =
        text(Search::random(&scratch.0, ranges(), 27, 6).budget(90).halving(Halving { factor: 3, first_budget: 10 }));
    assert!(
        other.contains(
            "with `search: random: 27 trials, seed 5` where this one has `search: random: 27 trials, seed 6`"
        ),
        "{other}"
    );
    fs::write(scratch.0.join("trial-0003/rung-0.json"), "{").unwrap();
    assert!(text(halved(&scratch.0)).contains("rung-0.json: is no result"));
}

/// The command of the tests, and a search for it.
#[cfg(unix)]
mod commands {
    use super::*;

    pub(super) const TRAIN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/search_command/train.sh");

    pub(super) const CONFIG: &str = "out = \"\"\nsteps = 8\nlr = 1.0\n[search]\nlr = [0.5, 4.0, 2.0]\n";

    fn search(folder: &Path) -> Search {
        let space = SearchSpace::from_toml(CONFIG).unwrap();
        let space = space.budget_field("steps").unwrap().folder_field("out").unwrap();
        Search::grid(folder, space).halving(Halving { factor: 3, first_budget: 2 }).metric("loss")
    }

    #[test]
    fn a_command_trains_as_its_configuration_says() {
        let scratch = Scratch::new("command");
        let report = search(&scratch.0).run(|trial| {
            assert!(trial.command(TRAIN)?.status()?.success());
            trial.last_recorded("loss")
        });
        let report = report.unwrap();
        let best = report.best().unwrap();
        assert_eq!((best.trial.number, &best.outcome, &best.points[..]), (0, &Ok(0.0625), &[(2, 0.25)][..]));
    }

    #[test]
    fn a_trial_is_taken_while_its_command_runs() {
        let scratch = Scratch::new("orphan");
        let mut left = None;
        let started = search(&scratch.0).run(|trial| {
            let mut command = trial.command(TRAIN)?;
            left = Some(command.arg("hang").spawn()?);
            while !trial.folder.join("hangs").exists() {
                sleep(Duration::from_millis(5));
            }
            Err(trial.interrupted())
        });
        started.unwrap_err();
        let mut left = left.unwrap();
        let mut seen = Vec::new();
        let next = search(&scratch.0).run(|trial| {
            seen.push(trial.number);
            if trial.number == 2 {
                left.kill()?;
            }
            Ok(f64::from(trial.number))
        });
        left.wait().unwrap();
        next.unwrap();
        assert_eq!(seen, [1, 2, 0, 0], "the trial of the command is run when that has ended");
    }

    #[cfg(feature = "program")]
    #[test]
    fn the_program_runs_a_command_for_each_trial() {
        let scratch = Scratch::new("program");
        fs::create_dir_all(&scratch.0).unwrap();
        let (file, folder) = (scratch.0.join("config.toml"), scratch.0.join("search"));
        fs::write(&file, CONFIG).unwrap();
        let run = |first_budget: &str, more: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_weftgrad-sweep"));
            command.arg("--space").arg(&file).arg("--folder").arg(&folder).args(["--metric", "loss"]);
            command.args([
                "--budget-field",
                "steps",
                "--folder-field",
                "out",
                "--first-budget",
                first_budget,
                "--",
                TRAIN,
            ]);
            let output = command.args(more).output().unwrap();
            (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
        };
        let (worked, text) = run("2", &[]);
        assert!(worked && text.contains("trial 0 up to 8: lr = 0.5"), "{text}");
        assert!(text.contains("\ntrial  budget  loss    lr\n0      8       0.0625  0.5\n"), "{text}");
        assert!(!run("0", &[]).0);
        fs::remove_dir_all(&folder).unwrap();
        let (worked, text) = run("2", &["fail"]);
        assert!(worked && text.matches("ended with exit status: 3").count() == 3, "{text}");
    }
}
