//! The table of features that exclude each other, and the book that prints it.

use std::fs;

use distributed::combinations::{COMBINATIONS, Refused};

use crate::prelude::*;

/// The lines between which the book has the table.
const MARKS: [&str; 2] = ["<!-- combinations -->\n", "<!-- end of combinations -->\n"];
/// Prints the table into the book again.
const WRITE: &str = "WEFTGRAD_TEST_WRITE";

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
fn the_book_prints_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/book/src/parallelism.md");
    let book = fs::read_to_string(&path).unwrap();
    let (before, rest) = book.split_once(MARKS[0]).expect("a mark");
    let (table, after) = rest.split_once(MARKS[1]).expect("a mark");
    if std::env::var_os(WRITE).is_some() {
        fs::write(&path, [before, MARKS[0], &printed(), MARKS[1], after].concat()).unwrap();
    } else {
        assert_eq!(table, printed(), "set {WRITE}=1 to print it again");
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
