"""Everything private of Flower that Raceme uses: the bridge to Flower's versions."""
