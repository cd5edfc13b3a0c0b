//! The table of features that exclude each other, the proofs that all other pairs work, and the book that prints both.

use std::fs;

use distributed::combinations::{COMBINATIONS, Refused};

use crate::{matrix, matrix_wrapped, prelude::*};

/// The lines between which the book has the pairs that are refused.
const REFUSED: [&str; 2] = ["<!-- combinations -->\n", "<!-- end of combinations -->\n"];
/// The lines between which the book has all pairs.
const PAIRS: [&str; 2] = ["<!-- pairs -->\n", "<!-- end of pairs -->\n"];
/// Prints the table into the book again.
const WRITE: &str = "WEFTGRAD_TEST_WRITE";

/// Features that come with another.
const IMPLIED: [(Feature, Feature); 6] = [
    (Feature::Tied, Feature::Pipeline),
    (Feature::Narrowed, Feature::Buckets),
    (Feature::Canonical, Feature::Buckets),
    (Feature::Canonical, Feature::ReduceEachPass),
    (Feature::GatherAsRead, Feature::ZeroParameters),
    (Feature::WeightsDiffer, Feature::Local),
];

/// Features of which a step or a loop has one at most.
const ALTERNATIVES: [&[Feature]; 3] = [
    &[Feature::ZeroOptimizer, Feature::ZeroGradients, Feature::ZeroParameters],
    &[Feature::GatherAsRead, Feature::Unused],
    &[Feature::Idle, Feature::NoBatches, Feature::RestoreBest, Feature::UseAtEnd],
];

/// Pairs that nobody can ask for, beside those of [`ALTERNATIVES`] and of Ddp.
const NEVER: &[([Feature; 2], &str)] = {
    use Feature::*;
    const REDUCERS: &str = "a reducer with a state is a reducer, which is refused";
    const LOOPS: &str = "`TrainStep::run` is a loop of the plain step";
    &[
        ([ZeroOptimizer, ReduceEachPass], "stage 1 sums once"),
        ([ReduceEachPass, Narrowed], "canonical order, reducers and stages of ZeRO are refused"),
        ([StatefulReducer, ZeroOptimizer], REDUCERS),
        ([StatefulReducer, ZeroGradients], REDUCERS),
        ([StatefulReducer, ZeroParameters], REDUCERS),
        ([StatefulReducer, GatherAsRead], REDUCERS),
        ([StatefulReducer, Narrowed], REDUCERS),
        ([StatefulReducer, Canonical], REDUCERS),
        ([NoBatches, Local], LOOPS),
        ([NoBatches, WeightsDiffer], LOOPS),
        ([NoBatches, Uneven], LOOPS),
        ([NoBatches, Elastic], "`TrainStep::run` has no commits between its steps, which an elastic run needs"),
    ]
};

/// Pairs that neither matrix draws, and the test of each.
const TESTS: &[([Feature; 2], &str)] = {
    use Feature::*;
    const BY_HAND: &str = "by_hand::gradients_of_halves_that_are_unfrozen_are_averaged";
    const TIES: &str = "pipeline_products::ties_beside_experts";
    &[
        ([ByHand, Unused], "by_hand::a_parameter_that_no_rank_used_has_no_gradient"),
        ([ByHand, HalfParameters], BY_HAND),
        ([ByHand, Unfreezing], BY_HAND),
        ([ByHand, WholeParameters], BY_HAND),
        ([Tied, Experts], TIES),
        ([Tied, CountedTokens], TIES),
        ([Uneven, Idle], "balance::a_step_of_uneven_counts_is_that_of_one_rank"),
    ]
};

/// How two features are known to work together, or why nobody can ask for both.
#[derive(Clone, Copy)]
enum Proof {
    /// The table refuses them.
    Refused,
    /// `matrix` draws them.
    Matrix,
    /// `matrix_wrapped` draws them.
    Wrapped,
    Test(&'static str),
    Never(&'static str),
}

impl Proof {
    fn of(pair: [Feature; 2], drawn: &[(Proof, Vec<Features>)]) -> Option<Self> {
        let [a, b] = pair;
        let is_pair = |known: &[Feature; 2]| *known == [a, b] || *known == [b, a];
        let with = |feature: Feature| {
            let implied = IMPLIED.iter().filter(|(of, _)| *of == feature).map(|(_, implied)| *implied);
            Features::of(implied.chain([feature]))
        };
        if COMBINATIONS.iter().any(|refused| is_pair(&refused.features)) {
            return Some(Proof::Refused);
        }
        let draws = |all: &[Features]| all.iter().any(|features| features.has(a) && features.has(b));
        if let Some((matrix, _)) = drawn.iter().find(|(_, all)| draws(all)) {
            return Some(*matrix);
        }
        if let Some((_, test)) = TESTS.iter().find(|(known, _)| is_pair(known)) {
            return Some(Proof::Test(test));
        }
        let (a, b) = (with(a), with(b));
        let are_two = |all: &&[Feature]| all.iter().any(|x| all.iter().any(|y| x != y && a.has(*x) && b.has(*y)));
        if ALTERNATIVES.iter().any(are_two) {
            return Some(Proof::Never("a step or a loop has one of them"));
        }
        if a.union(b).check("").is_err() {
            return Some(Proof::Never("what comes with them is refused"));
        }
        if pair.contains(&Feature::ByHand) {
            return Some(Proof::Never("a loop by hand has no training step"));
        }
        NEVER.iter().find(|(known, _)| is_pair(known)).map(|(_, why)| Proof::Never(why))
    }

    fn letter(self) -> &'static str {
        match self {
            Proof::Refused => "✗",
            Proof::Matrix => "m",
            Proof::Wrapped => "w",
            Proof::Test(_) => "t",
            Proof::Never(_) => "–",
        }
    }
}

/// The table of all pairs as the book has it, and the lists of its tests and of pairs that nobody can ask for.
fn printed_pairs() -> String {
    let drawn = [(Proof::Matrix, matrix::worked()), (Proof::Wrapped, matrix_wrapped::worked())];
    let of = |pair: &[Feature; 2]| Proof::of(*pair, &drawn);
    let tested = TESTS.iter().all(|(pair, _)| matches!(of(pair), Some(Proof::Test(_))));
    let excluded = NEVER.iter().all(|(pair, _)| matches!(of(pair), Some(Proof::Never(_))));
    assert!(tested && excluded, "a row of TESTS or NEVER is of a pair that is drawn or refused");
    let (mut rows, mut tests, mut never) = (String::new(), BTreeMap::new(), BTreeMap::new());
    for (k, &a) in Feature::ALL.iter().enumerate() {
        rows += &format!("| {} {} |", k + 1, a.name());
        for &b in &Feature::ALL[..k] {
            let proof = Proof::of([b, a], &drawn).unwrap_or_else(|| panic!("nothing shows {a:?} with {b:?}"));
            rows += &format!(" {} |", proof.letter());
            let pair = format!("{} with {}", b.name(), a.name());
            match proof {
                Proof::Test(test) => tests.entry(test).or_insert_with(Vec::new).push(pair),
                Proof::Never(why) => never.entry(why).or_insert_with(Vec::new).push(pair),
                _ => {}
            }
        }
        rows += &" |".repeat(Feature::ALL.len() - k - 1);
        rows += "\n";
    }
    let columns = Feature::ALL.len() - 1;
    let head: String = (1..=columns).map(|k| format!(" {k} |")).collect();
    let list = |all: BTreeMap<&str, Vec<String>>| {
        all.into_iter().map(|(name, pairs)| format!("| {name} | {} |\n", pairs.join("; "))).collect::<String>()
    };
    let (tests, never) = (list(tests), list(never));
    format!(
        "| |{head}\n|---|{}\n{rows}\n| a test of its own | of |\n|---|---|\n{tests}\n| why nobody can ask for both | pairs |\n\
         |---|---|\n{never}",
        "---|".repeat(columns)
    )
}

/// The table as the book has it: each reason once, with the pairs that it is of.
fn printed() -> String {
    let mut reasons: Vec<(&str, Vec<[Feature; 2]>)> = Vec::new();
    for Refused { features, why } in COMBINATIONS {
        match reasons.iter_mut().find(|(known, _)| known == why) {
            Some((_, pairs)) => pairs.push(*features),
            None => reasons.push((why, vec![*features])),
        }
    }
    let pair = |[a, b]: &[Feature; 2]| format!("{} with {}", a.name(), b.name());
    let row = |(why, pairs): &(&str, Vec<[Feature; 2]>)| {
        format!("| {} | {why} |\n", pairs.iter().map(pair).collect::<Vec<_>>().join("; "))
    };
    let rows: String = reasons.iter().map(row).collect();
    format!("| not together | why, and what to do instead |\n|---|---|\n{rows}")
}

#[test]
fn the_book_prints_the_tables() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book/src/parallelism.md");
    let mut book = fs::read_to_string(&path).unwrap();
    for ([begin, end], printed) in [(REFUSED, printed()), (PAIRS, printed_pairs())] {
        let (before, rest) = book.split_once(begin).expect("a mark");
        let (table, after) = rest.split_once(end).expect("a mark");
        if std::env::var_os(WRITE).is_some() {
            book = [before, begin, &printed, end, after].concat();
            fs::write(&path, &book).unwrap();
        } else {
            assert_eq!(table, printed, "set {WRITE}=1 to print it again");
        }
    }
}

#[test]
fn tests_of_pairs_are_there() {
    for (_, test) in TESTS {
        let (file, name) = test.split_once("::").expect("a file and a test");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/all").join(format!("{file}.rs"));
        let text = fs::read_to_string(path).unwrap();
        assert!(text.contains(&format!("#[test]\nfn {name}()")), "{test}");
    }
}

#[test]
fn a_pair_is_in_the_table_once_with_a_reason() {
    let mut pairs = BTreeSet::new();
    for Refused { features: [a, b], why } in COMBINATIONS {
        assert!(a != b && pairs.insert(BTreeSet::from([a, b])), "{a:?} with {b:?}");
        assert!(why.len() > 20 && !why.ends_with('.'), "{why}");
    }
}

#[test]
fn features_are_checked_pair_by_pair() {
    for &a in Feature::ALL {
        assert_eq!(Features::of([a]).iter().collect::<Vec<_>>(), [a]);
        for &b in Feature::ALL {
            let both = Features::of([a, b]);
            let refused =
                COMBINATIONS.iter().find(|refused| a != b && refused.features.iter().all(|of| [a, b].contains(of)));
            assert_eq!(both.check("a test").is_err(), refused.is_some(), "{both:?}");
            assert_eq!(Features::of([a]).allow(b), refused.is_none(), "{both:?}");
            if let Some(refused) = refused {
                let error = both.check("a test").unwrap_err().to_string();
                assert!([a.name(), b.name(), refused.why].iter().all(|part| error.contains(part)), "{error}");
            }
        }
    }
}
