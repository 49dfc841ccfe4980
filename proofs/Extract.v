(** The executable model as OCaml, for the differential tests in tests/proofs. Natural numbers become native integers:
    part of the trusted base of the tests, not of the proofs. *)
From ODB Require Import Types Grouping Packing Shards Alignment Machine Local Rules System Instance Rest Resume StandIn Run.
Require Import Extraction ExtrOcamlBasic ExtrOcamlNatInt.

Extraction Language OCaml.
Extraction "extracted/model.ml" shipped compute_groups compute_rows align odb_rule paper_rule target initial transition handle has_posted
  combine_offers reduce start perform rest_of save load stand_in shares.
