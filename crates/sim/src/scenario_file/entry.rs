//! A job's entry, as its system sees it: the table that is the system's own, and what other tables
//! have settled.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::de::{DeserializeOwned, Deserializer, Error, Visitor};
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::error::{Mistake, at, unknown};
use super::flows::transport;
use super::jobs::workload;
use super::lookup::{host, hosts};
use super::schema::{DtypeName, File, Hosts, Job, TransportTable};
use crate::net::{NodeId, Topology};
use crate::systems::System;
use crate::workload::{SwitchPlan, TransportPlan, Workload};

/// A system, to scenario files.
#[derive(Clone, Copy)]
pub struct Kind {
    /// The value of `system`, and the name of the system's own table: `[job.NAME]`.
    pub name: &'static str,
    /// The names in that table: [`keys`] of what it is read as.
    pub keys: fn() -> &'static [&'static str],
    /// Makes the system of a job's entry, or says what is wrong with that.
    pub resolve: fn(&mut Entry<'_>) -> Result<Arc<dyn System>, Mistake>,
}

/// The keys of a table that is read as `T`, from its declaration.
#[must_use]
pub fn keys<T: DeserializeOwned>() -> &'static [&'static str] {
    let mut found: &'static [&'static str] = &[];
    // It is only asked what it would take; nothing is there to be taken.
    let _: Result<T, _> = T::deserialize(Asked(&mut found));
    found
}

/// Hands a struct nothing, and remembers which fields it asked for.
struct Asked<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Asked<'_> {
    type Error = serde::de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
        Err(Self::Error::custom("nothing is there"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = fields;
        Err(Self::Error::custom("nothing is there"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct newtype_struct seq
        tuple tuple_struct map enum identifier ignored_any
    }
}

/// A job's system, and the table of the same name; an absent one is empty.
pub(super) struct OwnTable<'i> {
    pub(super) kind: Kind,
    table: Spanned<DeValue<'i>>,
}

/// Takes each job's own table out of the document: the rest has the same keys for all systems.
pub(super) fn own_tables<'i>(
    document: &mut DeTable<'i>,
    kinds: &[Kind],
) -> Result<Vec<OwnTable<'i>>, Mistake> {
    let Some(DeValue::Array(jobs)) = document.get_mut("job").map(Spanned::get_mut) else {
        return Ok(Vec::new()); // None, or none that is a table: the schema says so.
    };
    let mut tables = Vec::new();
    for job in jobs.iter_mut() {
        let DeValue::Table(job) = job.get_mut() else { continue };
        let Some((system, span)) = job.get("system").and_then(|it| Some((it.get_ref().as_str()?, it.span())))
        else {
            continue;
        };
        let names = || kinds.iter().map(|kind| kind.name);
        let kind = kinds
            .iter()
            .find(|kind| kind.name == system)
            .ok_or_else(|| Mistake { span: Some(span), message: unknown("system", system, names()) })?;
        let of_others = job.keys().find(|key| {
            let key = key.get_ref().as_ref();
            key != kind.name && names().any(|name| name == key)
        });
        if let Some(key) = of_others {
            let (given, own) = (key.get_ref(), kind.name);
            return Err(at(
                key,
                format!("this job's system is {own}: its table is [job.{own}], not [job.{given}]"),
            ));
        }
        let moved = job.keys().find(|key| {
            let key = key.get_ref().as_ref();
            (kind.keys)().contains(&key) && !keys::<Job>().contains(&key)
        });
        if let Some(key) = moved {
            let (given, own) = (key.get_ref(), kind.name);
            return Err(at(
                key,
                format!("`{given}` is a key of {own} alone: it stands in the table [job.{own}]"),
            ));
        }
        let table = job.remove(kind.name);
        tables.push(OwnTable {
            kind: *kind,
            table: table.unwrap_or_else(|| Spanned::new(0..0, DeValue::Table(DeTable::new()))),
        });
    }
    Ok(tables)
}

/// A job's entry in a scenario file, to its system.
pub struct Entry<'a> {
    pub(super) file: &'a File,
    pub(super) topology: &'a Topology,
    pub(super) number: usize,
    pub(super) workers: &'a [NodeId],
    /// Hosts of this job and those before it.
    pub(super) taken: &'a mut BTreeSet<NodeId>,
    pub(super) tables: &'a [OwnTable<'a>],
}

impl Entry<'_> {
    /// The system's own table, as its keys are declared: with `deny_unknown_fields`, and defaults
    /// for all that need not be given.
    ///
    /// # Errors
    /// The key that is none of them, with the nearest; a value that cannot be.
    pub fn table<T: DeserializeOwned>(&self) -> Result<T, Mistake> {
        let table = ValueDeserializer::from(self.tables[self.number].table.clone());
        T::deserialize(table).map_err(|error| match Mistake::of_toml(&error) {
            // A table that is not there stands nowhere.
            Mistake { span: Some(span), message } if span.is_empty() => self.at_system(message),
            mistake => mistake,
        })
    }

    /// Nodes and links.
    #[must_use]
    pub const fn topology(&self) -> &Topology {
        self.topology
    }

    /// Every programmable switch.
    #[must_use]
    pub fn switch(&self) -> SwitchPlan {
        super::switch_plan(self.file)
    }

    /// Longest IP packet, in bytes.
    #[must_use]
    pub fn mtu(&self) -> usize {
        *self.file.network.mtu.get_ref() as usize
    }

    /// The workers' hosts, by rank.
    #[must_use]
    pub const fn workers(&self) -> &[NodeId] {
        self.workers
    }

    /// The host of this name, which is then no more among those that are free.
    ///
    /// # Errors
    /// There is none.
    pub fn host(&mut self, name: &Spanned<String>) -> Result<NodeId, Mistake> {
        let found = host(self.topology, name.get_ref(), name)?;
        self.taken.insert(found);
        Ok(found)
    }

    /// Hosts of servers: those named, which are then no more among those that are free, or so many
    /// of the workers', evenly spread.
    ///
    /// # Errors
    /// There are none such, or one of them twice.
    pub(crate) fn servers(&mut self, given: &Spanned<Hosts>) -> Result<Vec<NodeId>, Mistake> {
        let found = hosts(self.topology, self.workers, given)?;
        self.taken.extend(&found);
        Ok(found)
    }

    /// How a job's connections are sent.
    ///
    /// # Errors
    /// What cannot be.
    pub(crate) fn transport(
        &self,
        given: &Option<Spanned<TransportTable>>,
    ) -> Result<TransportPlan, Mistake> {
        transport(given, &None, false, &self.job().priority)
    }

    /// The last host that is free.
    pub fn free_host(&mut self) -> Option<NodeId> {
        let found = self.topology.hosts().filter(|node| !self.taken.contains(node)).last()?;
        self.taken.insert(found);
        Some(found)
    }

    /// Counts the jobs whose system and table are so: how many come before this one, and how many
    /// there are.
    pub fn among(&self, is_one: impl Fn(&str, &DeTable<'_>) -> bool) -> (usize, usize) {
        let is_one = |table: &OwnTable<'_>| {
            table.table.get_ref().as_table().is_some_and(|keys| is_one(table.kind.name, keys))
        };
        let before = self.tables[..self.number].iter().filter(|table| is_one(table)).count();
        (before, self.tables.iter().filter(|table| is_one(table)).count())
    }

    /// Checks the number of workers.
    ///
    /// # Errors
    /// When it is not within the limits of a system.
    pub fn workers_between(&self, least: usize, most: usize) -> Result<(), Mistake> {
        let workers = self.workers.len();
        if workers < least {
            return Err(self.at_workers(format!("at least {least} workers")));
        }
        if workers > most {
            let message = format!("{workers} workers: more than the {most} that this system's bitmaps hold");
            return Err(self.at_workers(message));
        }
        Ok(())
    }

    /// A mistake in `workers`.
    pub fn at_workers(&self, message: impl std::fmt::Display) -> Mistake {
        at(&self.job().workers, message)
    }

    /// A mistake in `system`, or where nothing else is to blame.
    pub fn at_system(&self, message: impl std::fmt::Display) -> Mistake {
        at(&self.job().system, message)
    }

    /// A mistake in the network's `mtu`.
    pub fn at_mtu(&self, message: impl std::fmt::Display) -> Mistake {
        at(&self.file.network.mtu, message)
    }

    /// The tensors that the workers sum. Their order does not count, as it depends on the system,
    /// which is not there yet.
    ///
    /// # Errors
    /// What cannot be.
    pub(crate) fn workload(&self) -> Result<Workload, Mistake> {
        workload(self.job(), 0.0)
    }

    /// Which queue the job's packets are for, where the file says that.
    #[must_use]
    pub fn priority(&self) -> Option<&Spanned<u8>> {
        self.job().priority.as_ref()
    }

    /// Whether its tensors are int32.
    #[must_use]
    pub fn is_int32(&self) -> bool {
        self.job().dtype == DtypeName::Int32
    }

    fn job(&self) -> &Job {
        self.file.job[self.number].get_ref()
    }
}
