"""The delta rule with a decay per head or per key channel: what the gated delta rule and KDA share."""
